"""Descriptions of AdamCPR and SGDCPR for torch's generic optimizer checks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    ExponentialLR,
    LinearLR,
    PolynomialLR,
    ReduceLROnPlateau,
    StepLR,
)

from nnunet_cpr import SGDCPR, AdamCPR, KappaWS

with warnings.catch_warnings():
    from torch.testing._internal.common_optimizers import (
        ErrorOptimizerInput,
        OptimizerErrorEnum,
        OptimizerInfo,
        OptimizerInput,
        get_error_inputs_for_all_optims,
    )
# That import forbids the whole process to set flags such as torch.backends.cudnn.benchmark.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

Kwargs = dict[str, Any]

CPR_OPTIONS = frozenset({"kappa", "regularizer", "mu", "adaptive"})
CPR_GROUP_KEYS = (*sorted(CPR_OPTIONS), "regularize")
UNREACHED = KappaWS(10**6)
"""Bound that is never set, since no test trains long enough."""


class CPROptimizerInfo(OptimizerInfo):
    """Optimizer of this package, its inputs, and the torch optimizer that it extends."""

    def __init__(
        self, optim_cls: Any, torch_cls: Any, torch_defaults: Kwargs, bounded: Kwargs, **options: Any
    ) -> None:
        super().__init__(
            optim_cls,
            supported_impls=("fused",),
            supports_fused_on=("cpu", "cuda"),
            supports_complex=False,
            not_og_supported_flags=(
                *("foreach", "differentiable", "fused", "maximize", "capturable"),
                *CPR_GROUP_KEYS,
            ),
            **options,
        )
        self.torch_cls = torch_cls
        self.torch_defaults = torch_defaults
        self.bounded = bounded

    def inputs(
        self, dtype: torch.dtype = torch.float32, fused: bool | None = None, bounds: bool = True
    ) -> Iterator[Kwargs]:
        """Yield keyword arguments that no other caller shares.

        Args:
            dtype: the parameters' type.
            fused: the implementation; None leaves the choice to the optimizer.
            bounds: include those with which CPR corrects parameters.
        """
        for optimizer_input in self.optim_inputs_func("cpu", dtype):
            kwargs = optimizer_input.kwargs
            if bounds or CPR_OPTIONS.isdisjoint(kwargs):
                yield {**kwargs, "fused": fused}

    def torch_optimizer(self, params: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return the torch optimizer with the settings of one of this package without a bound."""
        ours = {key: value for key, value in kwargs.items() if key not in CPR_OPTIONS}
        return self.torch_cls(params, **{**self.torch_defaults, **ours})


def _inputs(configurations: dict[str, Kwargs]) -> list[OptimizerInput]:
    return [OptimizerInput(None, kwargs, description) for description, kwargs in configurations.items()]


def _adamcpr_inputs(device: Any = None, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    inputs = _inputs(
        {
            "default": {},
            "lr": {"lr": 0.01},
            "tensor lr": {"lr": torch.tensor(0.001)},
            "betas, eps": {"betas": (0.8, 0.95), "eps": 1e-6},
            "maximize": {"maximize": True},
            "amsgrad": {"amsgrad": True},
            "amsgrad, maximize": {"amsgrad": True, "maximize": True},
            "bound on the initial value": {"kappa": "ki0x0p9", "mu": 0.1},
            "adaptive bound": {"kappa": "ws2", "adaptive": True, "lr": torch.tensor(0.01)},
            "amsgrad, bound on l1": {"kappa": "ki0x0p95", "regularizer": "l1", "amsgrad": True},
        }
    )
    if dtype is torch.float16:
        for optimizer_input in inputs:
            optimizer_input.kwargs["eps"] = 0.1  # 1e-8 is 0 in half precision
    return inputs


def _sgdcpr_inputs(device: Any = None, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    return _inputs(
        {
            "default": {},
            "lr": {"lr": 0.005},
            "tensor lr": {"lr": torch.tensor(0.001)},
            "momentum": {"momentum": 0.9},
            "heavy-ball momentum": {"momentum": 0.9, "nesterov": False},
            "no momentum": {"momentum": 0, "nesterov": False},
            "maximize": {"maximize": True},
            "bound on the initial value": {"kappa": "ki0x0p9", "mu": 0.1},
            "adaptive bound": {"kappa": "ws2", "adaptive": True, "momentum": 0.9},
            "bound on l1": {"kappa": "ki0x0p95", "regularizer": "l1", "momentum": 0.9},
        }
    )


def _error(kwargs: Kwargs, error_type: type[Exception], regex: str, **options: Any) -> Any:
    """Describe an error at construction from keyword arguments, or from ``params`` among them."""
    params = kwargs.pop("params", None)
    optimizer_input = OptimizerInput(params, kwargs, regex)
    return ErrorOptimizerInput(optimizer_input, error_type=error_type, error_regex=regex, **options)


def _common_errors(device: Any, dtype: torch.dtype) -> list[Any]:
    def matrix() -> nn.Parameter:
        return nn.Parameter(torch.ones(2, 2, dtype=dtype))

    generic = get_error_inputs_for_all_optims(device, dtype)
    for error in generic:
        error.error_regex = None  # types are torch's, messages also say what to do
    return [
        *generic,
        _error({"lr": -1e-3}, ValueError, "Invalid learning rate: -0.001"),
        _error({"weight_decay": 0.1}, TypeError, "weight_decay"),
        _error({"foreach": True}, TypeError, "foreach"),
        _error({"differentiable": True}, TypeError, "differentiable"),
        _error({"dampening": 0.1}, TypeError, "dampening"),
        _error({"params": []}, ValueError, "empty parameter list"),
        _error({"params": [matrix().cfloat()]}, TypeError, "complex"),
        _error({"params": ["weight"]}, TypeError, "str"),
        _error({"params": [{"params": [matrix()], "kapa": "ws9"}]}, TypeError, "kapa"),
        _error({"params": [{"params": [matrix()], "kappa": "warm"}]}, ValueError, "warm"),
        _error({"params": [{"params": [matrix()], "mu": 0.0}]}, ValueError, "mu"),
        _error({"kappa": "warm"}, ValueError, "warm"),
        _error({"kappa": 0.5}, TypeError, "kappa"),
        _error({"regularizer": "l3"}, ValueError, "l3"),
        _error({"mu": -1.0}, ValueError, "mu"),
        _error(
            {"params": [nn.Parameter(torch.ones(3, dtype=dtype))]},
            UserWarning,
            "parameter to regularize",
        ),
    ]


def _adamcpr_errors(device: Any, dtype: torch.dtype) -> list[Any]:
    sparse = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    sparse.grad = torch.ones(2, 2, dtype=dtype).to_sparse()
    half = torch.tensor(0.5)
    return [
        *_common_errors(device, dtype),
        _error({"betas": (1.0, 0.0)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
        _error({"betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1: 1.0"),
        _error({"betas": (0.9, half)}, ValueError, "betas must be either both floats or both Tensors"),
        _error({"eps": -1.0}, ValueError, "Invalid epsilon value: -1.0"),
        _error(
            {"params": [sparse]},
            RuntimeError,
            "Adam does not support sparse gradients",
            error_on=OptimizerErrorEnum.STEP_ERROR,
        ),
    ]


def _sgdcpr_errors(device: Any, dtype: torch.dtype) -> list[Any]:
    return [
        *_common_errors(device, dtype),
        _error({"momentum": -0.5}, ValueError, "Invalid momentum value: -0.5"),
        _error({"momentum": 0}, ValueError, "Nesterov momentum requires a momentum"),
    ]


optimizer_infos = [
    CPROptimizerInfo(
        AdamCPR,
        torch.optim.Adam,
        torch_defaults={},
        bounded={"lr": 0.01, "kappa": "ki0x0p9"},
        optim_inputs_func=_adamcpr_inputs,
        optim_error_inputs_func=_adamcpr_errors,
        has_capturable_arg=True,
        scheduler_inputs=(
            [lambda opt: ExponentialLR(opt, gamma=0.9)],
            [lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4), ReduceLROnPlateau],
            [lambda opt: PolynomialLR(opt, power=0.9, total_iters=25)],
        ),
    ),
    CPROptimizerInfo(
        SGDCPR,
        torch.optim.SGD,
        torch_defaults={"momentum": 0.99, "nesterov": True},
        bounded={"lr": 0.005, "kappa": "ki0x0p9"},
        optim_inputs_func=_sgdcpr_inputs,
        optim_error_inputs_func=_sgdcpr_errors,
        supports_sparse=True,
        scheduler_inputs=(
            [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
            [lambda opt: LinearLR(opt, start_factor=0.4, end_factor=0.8, total_iters=4)],
            [lambda opt: ConstantLR(opt, factor=0.4, total_iters=4), ReduceLROnPlateau],
        ),
    ),
]
