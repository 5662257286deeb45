"""Constrained Parameter Regularization for nnU-Net and for any PyTorch training loop.

The names below are imported when they are first used, so that ``nnunet-cpr --help`` need not wait
for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnunet_cpr.bounds import KappaIP, KappaK, KappaKI0, KappaWS
    from nnunet_cpr.cpr import CPR
    from nnunet_cpr.optimizers import SGDCPR, AdamCPR, MuonCPR

__version__ = "0.1.0"

__all__ = ["CPR", "SGDCPR", "AdamCPR", "KappaIP", "KappaK", "KappaKI0", "KappaWS", "MuonCPR"]

_MODULES = {
    "CPR": "cpr",
    "AdamCPR": "optimizers",
    "SGDCPR": "optimizers",
    "KappaIP": "bounds",
    "KappaK": "bounds",
    "KappaKI0": "bounds",
    "KappaWS": "bounds",
    "MuonCPR": "optimizers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
