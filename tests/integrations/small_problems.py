"""Small training problems, and comparisons of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def small_model(dtype: torch.dtype = torch.float32, seed: int = 1) -> nn.Sequential:
    """Return a network of two linear layers, the same for the same seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())
    return model.to(dtype)


def backward(model: nn.Module, scale: float = 1.0) -> Tensor:
    """Compute the gradients of a network of :func:`small_model` and return the loss."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    inputs = torch.linspace(0.1, 0.6, 6).mul(scale).to(dtype).reshape(3, 2)
    loss = model(inputs).sum()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    """Train a network of :func:`small_model` and return the losses before each step."""
    losses = []
    for step in range(steps):
        losses.append(backward(model, 1 + 0.1 * step).item())
        optimizer.step()
    return losses


def linear_problem(contiguous: bool = True) -> tuple[list[nn.Parameter], Callable[[], Tensor]]:
    """Return a weight and a bias, and a closure that computes their gradients and the loss."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(10, 5, 2, generator=generator)[..., 0]
    bias = torch.randn(10, 2, generator=generator)[..., 0]
    inputs = torch.randn(5, generator=generator)
    if contiguous:
        weight, bias = weight.contiguous(), bias.contiguous()
    params = [nn.Parameter(weight), nn.Parameter(bias)]

    def closure() -> Tensor:
        for p in params:
            p.grad = None
        loss = (params[0].mv(inputs) + params[1]).pow(2).sum()
        loss.backward()
        return loss

    return params, closure


def matrix_with_gradient(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    p = nn.Parameter(torch.randn(shape or (2, 3), dtype=dtype))
    p.grad = torch.randn_like(p)
    return p


def assert_all_equal(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
