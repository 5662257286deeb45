"""Script that calls one function and exits when its parent process exits.

``python -m nnunet_cpr.datasets._run_converter MODULE FUNCTION ARGUMENTS``, with the arguments as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time


def _exit_with(parent: int) -> None:
    """Kill this process group when its parent has exited, even by SIGKILL."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    if hasattr(os, "killpg"):
        threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
    module, function, arguments = sys.argv[1:]
    getattr(importlib.import_module(module), function)(**json.loads(arguments))
