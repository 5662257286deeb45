"""Descriptions of AdamCPR and SGDCPR for torch's generic optimizer checks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nnunet_cpr import SGDCPR, AdamCPR, KappaWS

with warnings.catch_warnings():
    from torch.testing._internal.common_optimizers import get_error_inputs_for_all_optims
# That import forbids the whole process to set flags such as torch.backends.cudnn.benchmark.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

Kwargs = dict[str, Any]
CPR_OPTIONS = frozenset({"kappa", "regularizer", "mu", "adaptive"})
LATER_OPTIONS = (
    "foreach",
    "differentiable",
    "fused",
    "maximize",
    "capturable",
    "regularize",
    *CPR_OPTIONS,
)
"""Settings that states of older versions lack."""
UNREACHED = KappaWS(10**6)
"""Bound that is never set, since no test trains long enough."""


@dataclass(frozen=True)
class CPROptimizerInfo:
    """Optimizer of this package, its arguments, and the torch optimizer that it extends."""

    optim_cls: Any
    torch_cls: Any
    torch_defaults: Kwargs
    bounded: Kwargs
    options: Callable[[], list[Kwargs]]
    wrong: Callable[[], list[tuple[type[Exception], str, Kwargs]]]

    @property
    def name(self) -> str:
        return self.optim_cls.__name__

    def inputs(
        self, dtype: torch.dtype = torch.float32, fused: bool | None = None, bounds: bool = True
    ) -> Iterator[Kwargs]:
        """Yield keyword arguments that no other caller shares.

        Args:
            dtype: the parameters' type.
            fused: the implementation; None leaves the choice to the optimizer.
            bounds: include those with which CPR corrects parameters.
        """
        is_half = dtype is torch.float16 and self.optim_cls is AdamCPR
        for kwargs in self.options():
            if bounds or CPR_OPTIONS.isdisjoint(kwargs):
                # An eps of 1e-8 is 0 in half precision.
                yield {**kwargs, **({"eps": 0.1} if is_half else {}), "fused": fused}

    def torch_optimizer(self, params: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return the torch optimizer with the settings of one of this package without a bound."""
        ours = {key: value for key, value in kwargs.items() if key not in CPR_OPTIONS}
        return self.torch_cls(params, **{**self.torch_defaults, **ours})

    def errors(self) -> Iterator[tuple[type[Exception], str, Any, Kwargs]]:
        """Yield torch's wrong arguments and ours: error, regular expression, parameters, arguments."""
        for error in get_error_inputs_for_all_optims("cpu", torch.float32):
            given = error.optimizer_error_input
            yield error.error_type, "", given.params, given.kwargs  # messages also say what to do
        group: Kwargs = {"params": [nn.Parameter(torch.ones(2, 2))], "kapa": "ws9"}
        yield TypeError, "kapa", [group], {}
        yield TypeError, "complex", [nn.Parameter(torch.ones(2, 2).cfloat())], {}
        for error_type, regex, kwargs in self.wrong():
            yield error_type, regex, None, kwargs


optimizer_infos = [
    CPROptimizerInfo(
        AdamCPR,
        torch.optim.Adam,
        torch_defaults={},
        bounded={"lr": 0.01, "kappa": "ki0x0p9"},
        options=lambda: [
            {},
            {"lr": torch.tensor(0.001)},
            {"betas": (0.8, 0.95), "eps": 1e-6},
            {"amsgrad": True, "maximize": True},
            {"kappa": "ki0x0p9", "mu": 0.1},
            {"kappa": "ws2", "adaptive": True, "lr": torch.tensor(0.01)},
            {"kappa": "ki0x0p95", "regularizer": "l1", "amsgrad": True},
        ],
        wrong=lambda: [
            (ValueError, "Invalid learning rate: -0.001", {"lr": -1e-3}),
            (TypeError, "weight_decay", {"weight_decay": 0.1}),
            (ValueError, "mu", {"mu": -1.0}),
            (ValueError, "Invalid beta parameter at index 0: 1.0", {"betas": (1.0, 0.0)}),
        ],
    ),
    CPROptimizerInfo(
        SGDCPR,
        torch.optim.SGD,
        torch_defaults={"momentum": 0.99, "nesterov": True},
        bounded={"lr": 0.005, "kappa": "ki0x0p9"},
        options=lambda: [
            {},
            {"lr": torch.tensor(0.001)},
            {"momentum": 0.9, "nesterov": False},
            {"momentum": 0, "nesterov": False},
            {"maximize": True},
            {"kappa": "ki0x0p9", "mu": 0.1},
            {"kappa": "ws2", "adaptive": True, "momentum": 0.9},
            {"kappa": "ki0x0p95", "regularizer": "l1", "momentum": 0.9},
        ],
        wrong=lambda: [
            (TypeError, "dampening", {"dampening": 0.1}),
            (ValueError, "warm", {"kappa": "warm"}),
            (ValueError, "Invalid momentum value: -0.5", {"momentum": -0.5}),
            (ValueError, "Nesterov momentum requires a momentum", {"momentum": 0}),
        ],
    ),
]
