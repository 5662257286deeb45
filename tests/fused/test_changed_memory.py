"""Tensors that change between steps: fused steps must not access memory outside them.

As a program, ``python -m tests.fused.test_changed_memory EXAMPLES SEED``, it searches for changes that
break a step. A failure may be a crash; the last printed case is at fault.
"""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nnunet_cpr import SGDCPR, AdamCPR
from tests.helpers import ROOT

SHAPES = [(6, 5), (4, 3, 2), (7,)]
STEPS = 5
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sgd": (SGDCPR, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (AdamCPR, torch.optim.Adam, {"lr": 0.01}),
    "amsgrad": (AdamCPR, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
}
STATES = {
    "sgd": ["momentum_buffer"],
    "adam": ["exp_avg", "exp_avg_sq", "step"],
    "amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# What becomes of a tensor's data; the tensor object stays.
NEW_DATA: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"to {name}": lambda t, d=dtype: t.to(d) for name, dtype in DTYPES.items()},
    "to meta": lambda t: t.to("meta"),
    "to int32": lambda t: t.to(torch.int32),
    "with gaps": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "transposed in memory": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "view with an offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "first row": lambda t: t[:1],
    "repeated": lambda t: torch.cat([t, t]),
    "expanded": lambda t: t[:1].expand(t.shape),
    "empty": lambda t: t[:0],
}
# What is done to a tensor in place.
IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "resize_ to more": lambda t: t.resize_(t.numel() + 50),
    "resize_ there and back": lambda t: (t.resize_(t.numel() + 999), t.resize_(t.numel() - 999)),
    "share_memory_": lambda t: t.share_memory_(),
}


class Change(NamedTuple):
    """Change before a step of parameter ``which``, its gradient or one of its states."""

    step: int
    of: str
    which: int
    how: str


class Training:
    """Steps on fixed gradients, with changes in between."""

    def __init__(self, kind: type, options: dict[str, Any], dtype: torch.dtype, ours: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
        self.params = [torch.nn.Parameter(v.to(dtype)) for v in values]
        more = {"kappa": "ws1000000"} if ours else {"foreach": False, "fused": False}
        self.optimizer = kind(self.params, **options, **more)

    def step(self, t: int, changes: list[Change]) -> None:
        generator = torch.Generator().manual_seed(100 + t)
        for p in self.params:
            values = torch.randn(100_000, generator=generator)[: p.numel()].view(p.shape)
            p.grad = values.to(p.device, p.dtype) if p.is_floating_point() else None
        for change in changes:
            if change.step == t:
                self.apply(change)
        self.optimizer.step()

    def apply(self, change: Change) -> None:
        p = self.params[change.which]
        own = {"parameter": p, "gradient": p.grad}
        target: Any = own[change.of] if change.of in own else self.optimizer.state[p].get(change.of)
        if target is None:
            return
        if change.how in NEW_DATA:
            target.data = NEW_DATA[change.how](target.data)
        elif change.how == "shared with another":
            target.data = self.params[change.which - 1].data
        elif not target.is_shared():  # torch itself crashes when it resizes shared memory
            with torch.no_grad():
                IN_PLACE[change.how](target.data if target is p else target)


def draw(rng: random.Random) -> tuple[str, str, list[Change]]:
    """Draw an optimizer, a dtype and one to three changes of tensors that exist by then."""
    kind, changes = rng.choice(list(KINDS)), []
    for _ in range(rng.randint(1, 3)):
        of = rng.choice(["parameter", "gradient", *STATES[kind]])
        step = rng.randrange(1 if of in STATES[kind] else 0, STEPS)
        how = rng.choice([*NEW_DATA, *IN_PLACE, "shared with another"])
        changes.append(Change(step, of, rng.randrange(len(SHAPES)), how))
    return kind, rng.choice(list(DTYPES)), sorted(changes)


def error_of(training: Training, t: int, changes: list[Change]) -> Exception | None:
    """Take a step; return what it raised."""
    try:
        training.step(t, changes)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, ArithmeticError) as error:
        return error
    return None


def check(kind: str, dtype: str, changes: list[Change]) -> None:
    """Compare with torch's for-loop step until one of the two raises."""
    ours_class, torchs_class, options = KINDS[kind]
    ours = Training(ours_class, options, DTYPES[dtype], ours=True)
    theirs = Training(torchs_class, options, DTYPES[dtype], ours=False)
    for t in range(STEPS):
        error = error_of(ours, t, changes)
        if error is not None:
            assert str(error), f"{type(error).__name__} without a message"
            return
        expected = error_of(theirs, t, changes)
        assert expected is None, f"torch's step raises {expected!r} and ours does not"
        is_rounded = "bfloat16" in str((dtype, changes, [p.dtype for p in theirs.params]))
        tolerance = 0.05 if is_rounded else 1e-4
        for p, q in zip(ours.params, theirs.params):
            assert p.is_meta == q.is_meta
            if not p.is_meta:
                torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, equal_nan=True)


def main(examples: int, random_seed: int) -> None:
    """Search through ``examples`` cases."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for number in range(examples):
        case = draw(random.Random(f"{random_seed} {number}"))
        print(case, flush=True)
        check(*case)


def run_search(examples: int, random_seed: int) -> None:
    command = [sys.executable, "-m", __name__, str(examples), str(random_seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"


def test_changed_tensors_give_torchs_step_or_an_error() -> None:
    run_search(150, 0)


@pytest.mark.release
def test_changed_tensors_survive_a_random_search() -> None:
    run_search(3000, torch.seed() % 2**32)


@pytest.mark.parametrize(
    "case",
    [
        ("sgd", "float64", [Change(0, "gradient", 0, "to int32"), Change(1, "parameter", 2, "to meta")]),
        ("sgd", "float64", [Change(2, "momentum_buffer", 1, "transposed in memory")]),
    ],
)
def test_changes_that_a_search_found(case: Any) -> None:
    check(*case)


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


def test_another_view_at_the_same_address_is_noticed() -> None:
    """The view has the address, strides and number of elements of the dense parameter before."""
    storage = torch.zeros(9)
    p = torch.nn.Parameter(storage[:6].view(2, 3))
    optimizer = SGDCPR([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = storage.clone()
    p.data = storage.as_strided((3, 2), (3, 1))
    p.grad = torch.ones_like(p)
    optimizer.state.clear()
    optimizer.step()
    assert torch.equal(storage != before, torch.tensor([True, True, False] * 3))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
