"""Search for changes of tensors between steps that break a fused step.

Run as a program in a process of its own, since a failure may be a crash: ``memory_changes.py EXAMPLES
SEED``, with a seed of -1 for the same examples in every run. The last case that it prints is at fault.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from nnunet_cpr import SGDCPR, AdamCPR

SHAPES = [(6, 5), (4, 3, 2), (7,)]
STEPS = 5

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sgd": (SGDCPR, torch.optim.SGD, SGD),
    "sgd without momentum": (SGDCPR, torch.optim.SGD, {"lr": 0.1, "momentum": 0.0, "nesterov": False}),
    "adam": (AdamCPR, torch.optim.Adam, {"lr": 0.01}),
    "amsgrad": (AdamCPR, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
}

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def _strided(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def _turned(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def _offset(t: Tensor) -> Tensor:
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


# What becomes of a tensor's data; the tensor object stays.
NEW_DATA: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"to {name}": lambda t, d=dtype: t.to(d) for name, dtype in DTYPES.items()},
    "to meta": lambda t: t.to("meta"),
    "to int32": lambda t: t.to(torch.int32),
    "clone": torch.clone,
    "with gaps": _strided,
    "transposed in memory": _turned,
    "view with an offset": _offset,
    "wider rows": lambda t: torch.cat([t.flatten(), t.flatten()]).as_strided(t.shape[::-1], t.stride()),
    "first row": lambda t: t[:1],
    "repeated": lambda t: torch.cat([t, t]),
    "expanded": lambda t: t[:1].expand(t.shape),
    "flat": lambda t: t.flatten(),
    "empty": lambda t: t[:0],
    "bits of int32": lambda t: t.view(torch.int32) if t.dtype == torch.float32 else t,
}
# What is done to a tensor in place.
IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "resize_ to more": lambda t: t.resize_(t.numel() + 50),
    "resize_ to less": lambda t: t.resize_(max(t.numel() // 2, 1)),
    "resize_ there and back": lambda t: (t.resize_(t.numel() + 999), t.resize_(t.numel() - 999)),
    "share_memory_": lambda t: t.share_memory_(),
    "storage doubled": lambda t: t.untyped_storage().resize_(t.untyped_storage().nbytes() * 2),
}


@dataclass(frozen=True)
class Change:
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
            p.grad = None
            if p.is_floating_point():
                p.grad = values.to(p.device, p.dtype)
        for change in changes:
            if change.step == t:
                self.apply(change)
        self.optimizer.step()

    def apply(self, change: Change) -> None:
        p = self.params[change.which]
        if change.of == "parameter":
            target: Any = p
        elif change.of == "gradient":
            target = p.grad
        else:
            target = self.optimizer.state[p].get(change.of)
        if target is None:
            return
        if change.how in NEW_DATA:
            target.data = NEW_DATA[change.how](target.data)
        elif change.how == "shared with another":
            target.data = self.params[change.which - 1].data
        elif not target.is_shared():  # torch itself crashes when it resizes shared memory
            with torch.no_grad():
                IN_PLACE[change.how](target.data if target is p else target)


STATES = {
    "sgd": ["momentum_buffer"],
    "sgd without momentum": [],
    "adam": ["exp_avg", "exp_avg_sq", "step"],
    "amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
}


@st.composite
def cases(draw: Any) -> tuple[str, str, list[Change]]:
    """Draw an optimizer, a dtype and one to three changes of tensors that exist by then."""
    kind = draw(st.sampled_from(list(KINDS)))
    changes = []
    for _ in range(draw(st.integers(1, 3))):
        of = draw(st.sampled_from(["parameter", "gradient", *STATES[kind]]))
        first = 1 if of in STATES[kind] else 0
        step, which = draw(st.integers(first, STEPS - 1)), draw(st.integers(0, len(SHAPES) - 1))
        how = draw(st.sampled_from([*NEW_DATA, *IN_PLACE, "shared with another"]))
        changes.append(Change(step, of, which, how))
    changes.sort(key=lambda change: change.step)
    return kind, draw(st.sampled_from(list(DTYPES))), changes


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
        for p, q in zip(ours.params, theirs.params):
            if p.is_meta:
                assert q.is_meta
                continue
            names = {str(x.dtype) for x in (*ours.params, *theirs.params)}
            tolerance = 0.05 if "bfloat16" in dtype + "".join(names) + str(changes) else 1e-4
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, equal_nan=True)


def main(examples: int, random_seed: int) -> None:
    """Search through ``count`` examples."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    settled = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=random_seed < 0,
        phases=[Phase.generate] if random_seed < 0 else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )

    def search(case: tuple[str, str, list[Change]]) -> None:
        print(case, flush=True)
        check(*case)

    test = given(cases())(search)
    settled(test if random_seed < 0 else seed(random_seed)(test))()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
