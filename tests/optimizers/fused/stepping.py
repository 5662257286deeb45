"""Optimizers with fused or unfused steps, on tensors of unusual shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnunet_cpr import SGDCPR, AdamCPR, KappaIP, KappaKI0
from nnunet_cpr.optimizers.kernels import fused_step

# Chunks of these tests are 2048 elements: some tensors have several, with a rest or without, or one
# element in the last.
SHAPES = [(64, 100), (17,), (3, 1000, 3), (5, 7), (2, 2048), (4097, 1), (1, 1), (0, 4), (3, 4, 5, 2)]


class CountingKernel:
    """The kernel, with the number of its steps."""

    steps = 0

    def __call__(self, *args: Any) -> bool:
        is_taken = fused_step(*args)
        self.steps += is_taken
        return is_taken


def use(optimizer: Any, kernel: str) -> None:
    """Make the optimizer use the kernel for the ``cpu``, or none."""
    counting = CountingKernel() if kernel == "cpu" else None
    optimizer._find_kernel = lambda device: counting


def parameters(
    dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [torch.nn.Parameter(v.to(dtype)) for v in values]


def set_gradients(params: list[torch.nn.Parameter], t: int, scale: float = 1.0) -> None:
    """Set noisy outward gradients, so that bounds are reached; sometimes one is missing."""
    generator = torch.Generator().manual_seed(1000 + t)
    starts = parameters(torch.float64, shapes=[tuple(p.shape) for p in params])
    for i, (p, start) in enumerate(zip(params, starts)):
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        grad = (0.3 * noise - 0.5 * start.detach()).to(p.device, p.dtype)  # does not depend on rounding
        p.grad = None if (t, i) in {(2, 0), (4, 4)} else grad * scale


def run(
    build: Callable[..., Any],
    kernel: str,
    dtype: torch.dtype = torch.float32,
    steps: int = 8,
    **options: Any,
) -> Any:
    params = parameters(dtype)
    optimizer = build(params, **options)
    use(optimizer, kernel)
    for t in range(steps):
        set_gradients(params, t, -1.0 if options.get("maximize") else 1.0)
        optimizer.step()
    in_kernels = options.get("momentum") != 0 and not options.keys() & {"maximize", "amsgrad"}
    if kernel == "cpu" and dtype == torch.float32 and in_kernels:
        assert optimizer._find_kernel(None).steps == steps
    return optimizer


def values(optimizer: Any) -> list[torch.Tensor]:
    return [p.detach().cpu().double() for group in optimizer.param_groups for p in group["params"]]


def assert_same(ours: Any, expected: Any, rtol: float) -> None:
    for p, q in zip(values(ours), values(expected)):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)
    assert ours.cpr.step_count == expected.cpr.step_count
    torch.testing.assert_close(ours.cpr.kappa.cpu(), expected.cpr.kappa.cpu(), rtol=10 * rtol, atol=0)
    torch.testing.assert_close(
        ours.cpr.lagrange_multiplier.cpu(),
        expected.cpr.lagrange_multiplier.cpu(),
        rtol=0,
        atol=10 * rtol,
    )


BOUNDED = {"kappa": KappaKI0(1.0), "mu": 0.1, "fused": True}
VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (SGDCPR, {"lr": 0.02}),
    "sgd-heavy-ball": (SGDCPR, {"lr": 0.02, "momentum": 0.9, "nesterov": False, "maximize": True}),
    "adam": (AdamCPR, {"lr": 0.02}),
    "adam-betas": (AdamCPR, {"lr": 0.02, "betas": (0.0, 0.9), "eps": 1e-3, "maximize": True}),
    "adam-amsgrad": (AdamCPR, {"lr": 0.02, "amsgrad": True}),
    "adam-lr-tensor": (AdamCPR, {"lr": torch.tensor(0.02)}),
    "adam-ip": (AdamCPR, {"lr": 0.02, "kappa": KappaIP(1)}),
}
