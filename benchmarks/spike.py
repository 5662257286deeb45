"""Count the steps until a matrix recovers from a spike of its weights: ``python -m benchmarks.spike``.

A step multiplies the matrix by a factor, and the next one finds it restored, as after a rollback. The
loss pulls it to weights of the size that its bound allows. Compared are the paper's Lagrange multiplier,
of which only the correction is limited, and one that is limited when it is stored.
"""

from __future__ import annotations

import warnings

import torch
import typer
from rich.console import Console
from rich.table import Table

from nnunet_cpr import SGDCPR

SPIKE = 5
"""Step of the spike."""


def steps_to_recover(factor: float, stores_limited: bool, lr: float, steps: int) -> int | None:
    """Return the steps from a spike until R is half of that before, None if it is not within ``steps``.

    Args:
        factor: factor of the weights in the spike.
        stores_limited: True for multipliers that are limited to 0.5 when they are stored.
        lr: learning rate.
        steps: number of steps of the trial.
    """
    generator = torch.Generator().manual_seed(0)
    start, target = (0.03 * torch.randn(64, 64, generator=generator) for _ in range(2))
    p = torch.nn.Parameter(start.clone())
    optimizer = SGDCPR([("weight", p)], lr=lr, momentum=0.0, nesterov=False, kappa="ki0x1")
    with torch.no_grad():
        for step in range(steps):
            if step in (SPIKE, SPIKE + 1):
                p.copy_(factor * start if step == SPIKE else start)
            p.grad = p - target
            optimizer.step()
            if stores_limited:
                optimizer.cpr._state["lagrange_multiplier"].clamp_(max=0.5)
            if step > SPIKE + 1 and p.square().mean() > 0.5 * start.square().mean():
                return step - SPIKE
    return None


def main(lr: float = 0.01, steps: int = 6000) -> None:
    """Print the steps until R is half of that before the spike."""
    warnings.filterwarnings("ignore", message="R of .* was so far above its bound")
    table = Table("factor of the weights", "the paper's multiplier", "limited when stored")
    for factor in (3.0, 10.0, 30.0, 100.0, 1e3, 1e6):
        found = (steps_to_recover(factor, limited, lr, steps) for limited in (False, True))
        table.add_row(f"{factor:g}", *(f"more than {steps}" if n is None else str(n) for n in found))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
