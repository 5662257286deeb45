"""Signatures of the public names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

METHODS = {"CPR": ("attach", "detach", "step", "metrics", "state_dict", "load_state_dict")}
"""Documented methods, apart from those of ``torch.optim.Optimizer``."""
PROPERTIES = {"CPR": ("names", "parameters", "kappa", "lagrange_multiplier", "measure")}


def public_signatures() -> dict[str, Any]:
    """Return the exported names, and the parameters of each class and method."""
    import nnunet_cpr

    names = sorted(nnunet_cpr.__all__)
    found: dict[str, Any] = {"names": names}
    for name in names:
        exported = getattr(nnunet_cpr, name)
        found[name] = parameters_of(exported)
        for method in METHODS.get(name, ()):
            found[f"{name}.{method}"] = parameters_of(getattr(exported, method))
    return found


def parameters_of(function: Callable[..., Any]) -> list[list[str]]:
    """Return name, kind and default of each parameter."""
    return [
        [p.name, p.kind.name, "" if p.default is p.empty else repr(p.default)]
        for p in inspect.signature(function).parameters.values()
    ]
