"""Small parameters with gradients, and optimizer steps with and without a closure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def set_gradients(params: Iterable[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)


def matrix(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.full((2, 3), value, dtype=dtype))
    p.grad = torch.zeros_like(p)
    return p


def take_same_steps(
    steps: int, *pairs: tuple[torch.nn.Module, torch.optim.Optimizer], rtol: float, atol: float
) -> None:
    """Step models with the same gradients and check that they end equal."""
    for t in range(steps):
        for model, optimizer in pairs:
            set_gradients(model.parameters(), t)
            optimizer.step()
    first, *others = [list(model.parameters()) for model, _ in pairs]
    for other in others:
        torch.testing.assert_close(other, first, rtol=rtol, atol=atol)


def take_steps_by_closure(
    build: Callable[[torch.nn.Parameter], torch.optim.Optimizer],
) -> list[tuple[torch.Tensor, torch.optim.Optimizer]]:
    """Return a matrix after three steps and its optimizer, with each way to pass a closure."""
    results = []
    for use in (None, "position", "keyword"):  # Lightning names it
        p = torch.nn.Parameter(torch.linspace(1, 2, 6).reshape(2, 3))
        optimizer = build(p)

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (p**3).sum()
            loss.backward()
            return loss

        for _ in range(3):
            if use is None:
                closure()
                optimizer.step()
            elif use == "position":
                assert optimizer.step(closure) is not None
            else:
                assert optimizer.step(closure=closure) is not None
        results.append((p.detach(), optimizer))
    return results
