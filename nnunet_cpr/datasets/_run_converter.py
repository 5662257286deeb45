"""Calls one function, in a process that ends with the one that started it.

``python -m nnunet_cpr.datasets._run_converter MODULE FUNCTION ARGUMENTS``, the arguments as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time


def _end_with(parent: int) -> None:
    """End this process and those of its session once its parent is gone, even by SIGKILL."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    if hasattr(os, "killpg"):
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    module, function, arguments = sys.argv[1:]
    getattr(importlib.import_module(module), function)(**json.loads(arguments))
