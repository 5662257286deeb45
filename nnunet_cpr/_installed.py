"""Packages that only a part of this package needs, for installations with ``pip install --no-deps``."""

from __future__ import annotations

from importlib.util import find_spec

TRAINERS_NEED = ("nnunetv2", "matplotlib", "psutil", "filelock")
COMMANDS_NEED = (
    *TRAINERS_NEED, "typer", "rich", "pydantic", "yaml", "pandas", "scipy", "SimpleITK", "nibabel",
    "submitit", "jinja2",
)  # fmt: skip
"""Modules that commands, studies and reports import, beside those of the optimizers."""


def check_installed(user: str, modules: tuple[str, ...] = COMMANDS_NEED) -> None:
    """Check that modules can be found, without importing them.

    Args:
        user: what needs them, for the error message.
        modules: names of top-level modules.

    Raises:
        ModuleNotFoundError: some are missing; the message names them.

    Example:
        >>> check_installed("nnunet-cpr", ("torch", "no_module"))
        Traceback (most recent call last):
        ModuleNotFoundError: nnunet-cpr: expected no_module to be installed; run pip install . in ...
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{user}: expected {', '.join(missing)} to be installed; run pip install . in a clone of "
            "nnunet-cpr, without --no-deps",
            name=missing[0],
        )
