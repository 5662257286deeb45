"""Comparison of the optimizers' steps on a device with unfused ones, in values and in time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from nnunet_cpr import SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.optimizers.fused_step import Kernel, find_kernel

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TOLERANCE = 32
"""Largest difference from unfused steps, in units of the dtype's precision."""

_Find = Callable[[torch.device], Kernel | None]
_Build = Callable[[list[nn.Parameter]], Any]

_SHAPES = ((70, 300), (5, 3), (1, 1), (7,))
"""Shapes of the parameters that are stepped."""
_SGD: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGDCPR": partial(SGDCPR, **_SGD),
    "AdamCPR": partial(AdamCPR, betas=(0.9, 0.9), eps=1e-2),  # half precision loses small moments
    "MuonCPR": partial(MuonCPR, ns_dtype="float64"),  # devices round matrix products differently
}


@dataclass(frozen=True)
class StepResult:
    """Three steps of an optimizer, compared with unfused ones in float64 on the CPU.

    Attributes:
        optimizer: name of its class.
        dtype: of parameters, gradients and state, such as ``float32``.
        is_fused: True if a kernel of this package took the steps, False if torch did.
        difference: largest difference of a parameter, in units of the dtype's precision.
        problem: what is wrong, "" if the steps are right.
    """

    optimizer: str
    dtype: str
    is_fused: bool
    difference: float
    problem: str = ""

    def __str__(self) -> str:
        step = "fused" if self.is_fused else "torch's"
        verdict = self.problem or "ok"
        return f"{self.optimizer:8} {self.dtype:9} {step:8} {self.difference:8.3g} eps  {verdict}"


def check_steps(device: torch.device, find: _Find = find_kernel) -> Iterator[StepResult]:
    """Compare steps of each optimizer in each dtype with unfused ones in float64 on the CPU.

    Args:
        device: device of the steps.
        find: function that returns the kernel of the fused steps, for tests.

    Example:
        >>> next(check_steps(torch.device("cpu"))).problem
        ''
    """
    has_kernel = find(device) is not None
    for name, dtype in product(_OPTIMIZERS, DTYPES):
        should_fuse = name != "MuonCPR" and has_kernel and dtype == torch.float32
        build = partial(_OPTIMIZERS[name], lr=0.05, kappa="ki0x0p9", mu=0.1)
        difference, is_fused, reason = float("inf"), should_fuse, ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                difference, is_fused = _step_difference(build, device, dtype, find)
            except Exception as error:  # compilers raise errors of many classes
                reason = f": {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if should_fuse and not is_fused:
            reason = f": no fused step ({caught[-1].message if caught else 'no reason given'})"
        is_wrong = reason or difference > TOLERANCE
        problem = f"wrong{reason}" if is_wrong else ""
        yield StepResult(name, str(dtype)[6:], is_fused, difference, problem)


def _step_difference(
    build: _Build, device: torch.device, dtype: torch.dtype, find: _Find
) -> tuple[float, bool]:
    """Compare three steps of an optimizer with unfused ones in float64 on the CPU.

    Args:
        build: function that returns the optimizer of parameters.
        device, dtype: of parameters, gradients and state.
        find: function that returns the kernel of the fused steps for a device.

    Returns:
        The largest difference of a parameter in units of the dtype's precision, and True if the steps
        were fused.
    """
    found, is_fused = _take_steps(build, device, dtype, find)
    expected, _ = _take_steps(build, torch.device("cpu"), dtype, None)
    worst = ((found - expected).abs() / (expected.abs() + 1)).max() / torch.finfo(dtype).eps
    return float(worst.nan_to_num(float("inf"))), is_fused


def _take_steps(
    build: _Build, device: torch.device, dtype: torch.dtype, find: _Find | None
) -> tuple[Tensor, bool]:
    """Return the parameters after three steps in float64, and True if the steps were fused.

    Without ``find`` the steps are unfused and in float64, from the same start.
    """
    generator = torch.Generator("cpu").manual_seed(0)  # leaves the global generator alone
    values = [torch.randn(s, generator=generator, device="cpu") for _ in range(4) for s in _SHAPES]
    own = torch.float64 if find is None else dtype
    values = [value.to(dtype).to(device, own) for value in values]
    params = [nn.Parameter(value) for value in values[: len(_SHAPES)]]
    optimizer = build(params)
    outcomes: list[bool] = []
    kernel = find(device) if find is not None else None

    def record(*arguments: Any) -> bool:
        outcomes.append(kernel is not None and kernel(*arguments))
        return outcomes[-1]

    optimizer._find_kernel = lambda device: None if kernel is None else record
    for step in range(1, 4):
        for p, gradient in zip(params, values[step * len(_SHAPES) :]):
            p.grad = gradient
        optimizer.step()
    is_fused = bool(outcomes) and all(outcomes)
    return torch.cat([p.detach().cpu().double().flatten() for p in params]), is_fused


def step_times(device: torch.device, rounds: int = 20) -> dict[str, tuple[float, float]]:
    """Return the milliseconds of a step, and of one of torch's fused optimizer, for nnU-Net's network.

    Args:
        device: device of the steps.
        rounds: number of steps of each optimizer.
    """
    network = PlainConvUNet(
        1, 6, (32, 64, 128, 256, 320, 320), nn.Conv3d, 3, (1, 2, 2, 2, 2, 2), 2, 3, 2, conv_bias=True
    )
    shapes = [tuple(p.shape) for p in network.parameters()]

    def parameters() -> list[nn.Parameter]:
        params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        return params

    pairs = {
        "SGDCPR": (
            torch.optim.SGD(parameters(), 0.01, fused=True, **_SGD),
            SGDCPR(parameters(), 0.01, kappa="ki0x0p9", **_SGD),
        ),
        "AdamCPR": (
            torch.optim.AdamW(parameters(), 1e-3, fused=True),
            AdamCPR(parameters(), 1e-3, kappa="ki0x0p9"),
        ),
    }
    times = {}
    for name, pair in pairs.items():
        timers = [
            Timer("step()", globals={"step": each.step}, num_threads=torch.get_num_threads())
            for each in pair
        ]
        theirs, ours = (1e3 * timer.timeit(rounds).mean for timer in timers)
        times[name] = ours, theirs
    return times
