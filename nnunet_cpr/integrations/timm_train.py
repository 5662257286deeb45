"""Launcher for scripts such as timm's ``train.py``, with ``adamcpr``, ``muoncpr`` and ``sgdcpr``.

    python -m nnunet_cpr.integrations.timm_train train.py DATA --opt adamcpr --opt-kwargs kappa=ws6280
    torchrun --nproc-per-node 4 -m nnunet_cpr.integrations.timm_train train.py DATA --opt adamcpr

The script runs as with ``python train.py``: it has its own arguments, ``__main__`` and import folder.
"""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: python -m nnunet_cpr.integrations.timm_train SCRIPT [ARGUMENT ...]"


def main() -> None:
    """Run the script of the command line.

    Raises:
        SystemExit: the script does not exist, or timm is not installed.
    """
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        sys.exit(f"timm_train: script {script!r} does not exist; {USAGE}")
    sys.argv = arguments
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        # The script's own timm, which may be in its folder, comes first.
        import nnunet_cpr.integrations.timm  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        sys.exit("timm_train: timm is not installed; run: pip install 'nnunet-cpr[vision]'")
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
