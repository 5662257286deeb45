"""Tensors that change between steps: fused steps must not access memory outside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nnunet_cpr import SGDCPR, AdamCPR

SHAPES = [(6, 5), (4, 3, 2), (7,)]
STEPS = 5
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sgd": (SGDCPR, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (AdamCPR, torch.optim.Adam, {"lr": 0.01}),
}
STATES = {"sgd": ["momentum_buffer"], "adam": ["exp_avg", "exp_avg_sq", "step"]}
# What becomes of a tensor's data; the tensor object stays.
NEW_DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "to float64": lambda t: t.double(),
    "to bfloat16": lambda t: t.bfloat16(),
    "to int32": lambda t: t.to(torch.int32),
    "to meta": lambda t: t.to("meta"),
    "with gaps": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "transposed in memory": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "view with an offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "first row": lambda t: t[:1],
    "repeated": lambda t: torch.cat([t, t]),
    "empty": lambda t: t[:0],
}


class Change(NamedTuple):
    """Change before a step of parameter ``which``, its gradient or one of its states."""

    step: int
    of: str
    which: int
    how: str


class Training:
    """Steps on fixed gradients, with a change in between."""

    def __init__(self, kind: type, options: dict[str, Any], ours: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
        more = {"kappa": "ws1000000"} if ours else {"foreach": False, "fused": False}
        self.optimizer = kind(self.params, **options, **more)

    def step(self, t: int, change: Change) -> Exception | None:
        """Take a step and return what it or the change raised."""
        generator = torch.Generator().manual_seed(100 + t)
        for p in self.params:
            values = torch.randn(1000, generator=generator)[: p.numel()].view(p.shape)
            p.grad = values.to(p.device, p.dtype) if p.is_floating_point() else None
        try:
            if change.step == t:
                self.apply(change)
            self.optimizer.step()
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            return error
        return None

    def apply(self, change: Change) -> None:
        p = self.params[change.which]
        own = {"parameter": p, "gradient": p.grad, **self.optimizer.state[p]}
        target = own[change.of]
        if target.ndim or change.how.startswith("to "):  # else the number of steps
            target.data = NEW_DATA[change.how](target.data)


@pytest.mark.parametrize("how", NEW_DATA)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_tensors_give_torchs_step_or_an_error(kind: str, how: str) -> None:
    """Compare with torch's for-loop step until ours raises."""
    ours_class, torchs_class, options = KINDS[kind]
    for of in ("parameter", "gradient", *STATES[kind]):
        change = Change(2, of, 1, how)
        ours = Training(ours_class, options, ours=True)
        theirs = Training(torchs_class, options, ours=False)
        for t in range(STEPS):
            if error := ours.step(t, change):
                assert str(error), f"{type(error).__name__} without a message"
                break
            expected = theirs.step(t, change)
            assert expected is None, f"torch's step raises {expected!r} and ours does not"
            tolerance = 0.05 if how == "to bfloat16" else 1e-4
            for p, q in zip(ours.params, theirs.params):
                assert p.is_meta == q.is_meta
                if not p.is_meta:
                    torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def test_parameters_that_share_memory_are_stepped_in_turn() -> None:
    """Threads of a fused step would write to the same elements at once."""
    results = []
    for build in (AdamCPR, torch.optim.Adam):
        torch.manual_seed(0)
        p, q = (torch.nn.Parameter(torch.randn(300, 200)) for _ in range(2))
        q.data = p.data
        optimizer = build([p, q], lr=0.01)
        for _ in range(3):
            p.grad, q.grad = torch.ones_like(p), 2 * torch.ones_like(q)
            optimizer.step()
        results.append(p.detach().clone())
    assert torch.equal(*results)
