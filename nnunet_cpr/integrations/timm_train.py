"""Run a script, such as timm's own ``train.py``, in which timm knows ``adamcpr`` and ``sgdcpr``.

    python -m nnunet_cpr.integrations.timm_train train.py DATA --opt adamcpr --opt-kwargs kappa=ws6280
    torchrun --nproc-per-node 4 -m nnunet_cpr.integrations.timm_train train.py DATA --opt adamcpr

The script runs as ``python train.py`` would run it: the arguments, ``__main__`` and the folder that it
imports from are its own.
"""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: python -m nnunet_cpr.integrations.timm_train SCRIPT [ARGUMENT ...]"


def main() -> None:
    """Run the script that the command line names.

    Raises:
        SystemExit: there is no such script, or no timm.
    """
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        sys.exit(f"timm_run: there is no script {script!r}; {USAGE}")
    sys.argv = arguments
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        # Not before: beside timm's script may lie the timm that it belongs to.
        import nnunet_cpr.integrations.timm  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        sys.exit("timm_run: timm is not installed; pip install 'nnunet-cpr[vision]'")
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
