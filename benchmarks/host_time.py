"""Does a GPU wait for the host in a fused step? For developers: ``python -m benchmarks.host_time``.

The kernels of the Triton backend are replaced by functions that do nothing, and all tensors are on the
CPU, so that no GPU is needed. The reference is torch's fused step on the same tensors, which have four
elements: then it, too, does little but prepare the call. Its loop over the tensors in C++ stands for the
lists of addresses that torch fills for its CUDA kernels. CPR's update takes fewer operations than on a
GPU, where it must not read values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # without a GPU, Triton has no driver; read at its import

import torch
import typer
from rich.console import Console

from benchmarks.competitors import BASE, COMPETITORS
from benchmarks.limits import CheckOption, Limit, check_limits
from benchmarks.measure import Timing, gradients, in_turn, parameters, processor_time
from benchmarks.shapes import Shapes
from nnunet_cpr.fused import triton
from nnunet_cpr.optimizers._fused_step import FusedStep

MAXIMA = {10: 10.0, 100: 4.0, 1000: 2.5, 10_000: 1.5}
"""Largest accepted ratio for each number of tensors."""
OURS = {"Adam": "AdamCPR", "SGD": "SGDCPR"}

app = typer.Typer(add_completion=False)


@app.command()
def main(
    seconds: Annotated[float, typer.Option(help="Duration for each number of tensors.")] = 5.0,
    checks: CheckOption = False,
) -> None:
    """Time the host's part of steps on a GPU, in processor time, and compare it with torch's."""
    console = Console(width=110)
    torch.set_num_threads(1)
    limits = []
    for count, maximum in MAXIMA.items():
        for family in OURS:
            timing = host_time(family, count, seconds)
            name = f"{OURS[family]} / {BASE[family]}, {count:,} tensors"
            limits.append((Limit(name, maximum, aim=1.0), timing.ratio))
    if not check_limits(limits, console) and checks:
        raise typer.Exit(1)


def host_time(family: str, tensors: int, seconds: float, least: int = 15) -> Timing:
    """Return the host time of our step without its kernels, and its ratio to torch's fused step."""
    shapes: Shapes = [(f"{i}.weight", (2, 2)) for i in range(tensors)]
    grads = gradients(shapes, "cpu")
    steps: dict[str, Any] = {}
    with _without_kernels():
        for competitor in COMPETITORS:
            if competitor.name in (OURS[family], BASE[family]):
                named = parameters(shapes, "cpu")
                for (_, p), grad in zip(named, grads):
                    p.grad = grad
                steps[competitor.name] = competitor.build(named).step
        return in_turn(steps, BASE[family], seconds, least, clock=processor_time)[OURS[family]]


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Use the Triton backend for tensors on the CPU, with kernels that do nothing."""
    stub = _Stub()

    with (
        mock.patch.object(triton, "step_kernel", stub),
        mock.patch.object(FusedStep, "_find_backend", return_value=triton.TritonBackend),
        mock.patch.object(triton.TritonBackend, "is_proven", True),
    ):
        yield


class _Stub:
    """Kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run

    def _run(self, *arguments: Any, **constants: Any) -> None:
        pass


if __name__ == "__main__":
    app()
