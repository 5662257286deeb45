"""Time the host's part of CPR on the path of a GPU, on a CPU: ``python -m benchmarks.host_time``.

108 tensors as in nnU-Net's default network, of a few elements each, so that kernels cost next to nothing
and what is left is what the host does before a GPU can go on. Ratios are to torch's foreach step of SGD
on the same tensors, measured in turn with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import typer
from rich.console import Console

from benchmarks.limits import CheckOption, Limit, check_limits
from nnunet_cpr import SGDCPR, AdamCPR
from nnunet_cpr.cpr import sums
from nnunet_cpr.cpr.attachment import attachments
from nnunet_cpr.cpr.regularizers import L2

MATRICES, VECTORS = 27, 81
MAXIMUM = {"SGDCPR": 1.2, "AdamCPR": 1.35}
AIM = 0.5
"""Ratio that is about 250 us where version 0.3.0 took 490."""

app = typer.Typer(add_completion=False)


def build(kind: Callable[..., Any], **options: Any) -> Any:
    """Return an optimizer of tiny parameters with gradients, whose steps are those of a GPU."""
    shapes = [(2, 2)] * MATRICES + [(2,)] * VECTORS
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = kind(params, 1e-3, **options)
    optimizer._may_fuse = False  # no kernel of this package, as on a GPU
    for _ in range(30):
        optimizer.step()
    return optimizer


@torch.no_grad()
def regularize(optimizer: Any) -> None:
    """Do what CPR does in a step."""
    attachment = attachments[optimizer]
    if attachment.begin_step(optimizer):
        attachment.correct(optimizer)
        attachment.has_open_correction = False  # the step is over


def seconds(function: Callable[[], Any]) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@app.command()
def main(repeats: int = 1000, checks: CheckOption = False) -> None:
    """Time CPR's part of a step of SGDCPR and AdamCPR."""
    torch.set_num_threads(1)
    # As on a GPU.
    L2.sums = lambda self, params: sums.squared_norms(params)[None]  # type: ignore[method-assign]
    console, found = Console(width=100), []
    base = build(torch.optim.SGD, momentum=0.99, nesterov=True, foreach=True)
    for kind in (SGDCPR, AdamCPR):
        optimizer = build(kind, kappa="ki0x0p5")
        part = partial(regularize, optimizer)
        pairs = [(seconds(part), seconds(base.step)) for _ in range(repeats)]
        own, torchs = (median(times) for times in zip(*pairs))
        name = kind.__name__
        console.print(f"{name}: CPR {1e6 * own:.0f} us, torch's foreach step {1e6 * torchs:.0f} us")
        found.append((Limit(f"{name}, CPR's part / foreach step", MAXIMUM[name], AIM), own / torchs))
    if not check_limits(found, console) and checks:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
