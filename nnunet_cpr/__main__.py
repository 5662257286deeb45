"""Entry point of the ``nnunet-cpr`` command and of ``python -m nnunet_cpr``."""

from __future__ import annotations

import sys

from nnunet_cpr.environment import check_installed


def main() -> None:
    """Run the command, or name the packages that it lacks in one line."""
    try:
        check_installed("nnunet-cpr")
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    from nnunet_cpr import cli

    cli.main()


if __name__ == "__main__":
    main()
