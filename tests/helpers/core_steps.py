"""Five steps of both optimizers on fixed numbers, from the start or a saved state.

    python core_steps.py WRITE [READ]

It needs nothing but the package, so it runs in any environment that has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from nnunet_cpr import SGDCPR, AdamCPR, KappaKI0


def fixed(*shape: int, phase: float) -> torch.Tensor:
    """Return numbers that do not depend on the version of torch."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 0.7 + phase).float().reshape(shape)


def build(kind: str) -> tuple[torch.nn.Module, SGDCPR | AdamCPR]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(0.3 * fixed(*p.shape, phase=float(i)))
    cpr = {"kappa": KappaKI0(0.5), "mu": 0.1}
    return model, SGDCPR(model, 0.01, **cpr) if kind == "sgd" else AdamCPR(model, **cpr)


def steps(model: torch.nn.Module, optimizer: SGDCPR | AdamCPR, numbers: range) -> None:
    for i in numbers:
        optimizer.zero_grad()
        loss = (model(fixed(16, 40, phase=float(i))) - 5 * fixed(16, 20, phase=2.0 * i)).square().mean()
        loss.backward()
        optimizer.step()
    assert optimizer._backend is not None, "torch's own step was taken, not the compiled one"


def main(write: Path, read: Path | None) -> None:
    saved = torch.load(read, weights_only=True) if read else {}
    for kind in ("sgd", "adam"):
        model, optimizer = build(kind)
        if kind in saved:
            model.load_state_dict(saved[kind]["model"])
            optimizer.load_state_dict(saved[kind]["optimizer"])
        done = int(optimizer.cpr.state_dict()["state"]["step"])
        steps(model, optimizer, range(done, done + 5))
        saved[kind] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, write)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
