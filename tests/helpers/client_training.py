"""Small regression for training with each library and with a plain torch loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaWS

WARM_START = 2  # steps until the bounds are taken


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def samples(count: int = 32) -> tuple[Tensor, Tensor]:
    """Return inputs ``[count, 6]`` and targets ``[count, 3]``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def batches(size: int = 4, count: int = 32) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(tensor.split(size) for tensor in samples(count))))


def adam_cpr(model: nn.Module) -> torch.optim.Optimizer:
    return AdamCPR(model, lr=0.05, kappa=KappaWS(WARM_START))


def sgd_cpr(model: nn.Module) -> torch.optim.Optimizer:
    return SGDCPR(model, lr=0.02, kappa=KappaWS(WARM_START))


def adamw_with_cpr(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0)
    return CPR(model, kappa=KappaWS(WARM_START)).attach(optimizer)


METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamCPR": adam_cpr,
    "SGDCPR": sgd_cpr,
    "AdamW with CPR": adamw_with_cpr,
}


def clip(model: nn.Module, algorithm: str | None, limit: float) -> None:
    if algorithm == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), limit)
    elif algorithm == "value":
        nn.utils.clip_grad_value_(model.parameters(), limit)


def train_plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[tuple[Tensor, Tensor]],
    *,
    algorithm: str | None = None,
    limit: float = 0.1,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    accumulate: int = 1,
) -> None:
    """Train with torch alone, in the order of torch's documentation of mixed precision."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for i, (inputs, targets) in enumerate(data):
        with (
            torch.autocast(inputs.device.type, autocast, cache_enabled=False)
            if autocast
            else contextlib.nullcontext()
        ):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss / accumulate).backward()
        if (i + 1) % accumulate:
            continue
        if algorithm is not None:
            scaler.unscale_(optimizer)
            clip(model, algorithm, limit)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}


def assert_same(found: Any, expected: Any, where: str = "state", **tolerance: float) -> None:
    """Compare nested states: bit for bit, or within ``rtol`` and ``atol``."""
    if isinstance(expected, Tensor):
        tolerance = tolerance or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(
            found, expected, equal_nan=True, **tolerance, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]", **tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected)):
            assert_same(a, b, f"{where}[{i}]", **tolerance)
    else:
        assert found == expected, where


def assert_regularized(optimizer_state: dict[str, Any], steps: int) -> None:
    """Check that CPR has taken so many steps, found bounds and corrected something."""
    state = optimizer_state["cpr"]["state"]
    assert int(state["step"]) == steps
    assert bool(state["kappa"].isfinite().any())
    assert float(state["lagrange_multiplier"].max()) > 0
