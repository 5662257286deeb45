"""Small parameters with gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def set_gradients(params: Iterable[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)


def matrix(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.full((2, 3), value, dtype=dtype))
    p.grad = torch.zeros_like(p)
    return p
