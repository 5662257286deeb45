"""Tensors that change between steps: fused steps must not access memory outside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnunet_cpr import SGDCPR, AdamCPR
from nnunet_cpr.optimizers import FusedAdam, FusedSGD

SHAPES = [(6, 5), (4, 3, 2), (7,)]
STEPS = 5
KINDS: dict[str, tuple[type, type, dict[str, Any], list[str]]] = {
    "sgd": (
        *(SGDCPR, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ["momentum_buffer"],
    ),
    "adam": (AdamCPR, torch.optim.Adam, {"lr": 0.01}, ["exp_avg", "exp_avg_sq", "step"]),
}
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


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]


def step(optimizer: Any, t: int, of: str, how: str) -> Exception | None:
    """Take a step, the third with changed data of a parameter; return what it or the change raised."""
    params = optimizer.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(100 + t)
    for p in params:
        values = torch.randn(1000, generator=generator)[: p.numel()].view(p.shape)
        p.grad = values.to(p.device, p.dtype) if p.is_floating_point() else None
    try:
        if t == 2:
            p = params[1]
            target = {"parameter": p, "gradient": p.grad, **optimizer.state[p]}[of]
            if target.ndim or how.startswith("to "):  # else the number of steps
                target.data = NEW_DATA[how](target.data)
        optimizer.step()
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        return error
    return None


@pytest.mark.parametrize("how", NEW_DATA)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_tensors_give_torchs_step_or_an_error(kind: str, how: str) -> None:
    """Compare with torch's for-loop step until ours raises."""
    ours_class, torchs_class, options, states = KINDS[kind]
    for of in ("parameter", "gradient", *states):
        ours = ours_class(parameters(), **options, kappa="ws1000000")
        theirs = torchs_class(parameters(), **options, foreach=False, fused=False)
        for t in range(STEPS):
            if error := step(ours, t, of, how):
                assert str(error), f"{type(error).__name__} without a message"
                break
            expected = step(theirs, t, of, how)
            assert expected is None, f"torch's step raises {expected!r} and ours does not"
            tolerance = 0.05 if how == "to bfloat16" else 1e-4
            for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"]):
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


@pytest.mark.parametrize("build", [FusedSGD, FusedAdam])
def test_state_of_another_shape_is_not_written_to(build: Any) -> None:
    """Torch's fused kernels for the CPU would write beyond it."""
    options = {"momentum": 0.9} if build is FusedSGD else {}
    small, large = (build([nn.Parameter(torch.ones(n))], lr=0.1, **options) for n in (8, 64))
    for optimizer in (small, large):
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = torch.ones_like(p)
    small.step()
    large.load_state_dict(small.state_dict())
    with pytest.raises(RuntimeError):
        large.step()


@pytest.mark.parametrize("method", [True, False])
def test_parameter_within_another_tensor_is_stepped_alone(method: bool) -> None:
    whole, gradient = torch.ones(4, 8), torch.ones(4, 8)
    p = nn.Parameter(torch.ones(4, 4))
    p.data, p.grad = whole[:, :4], gradient[:, :4]
    build = partial(SGDCPR, momentum=0, nesterov=False) if method else FusedSGD
    build([("w", p)], lr=0.1).step()
    assert (whole[:, :4] == 0.9).all() and (whole[:, 4:] == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [SGDCPR, FusedSGD])
def test_half_precision_on_the_cpu_is_not_fused_by_default(build: Any, dtype: torch.dtype) -> None:
    """Torch's fused SGD changes nothing there in some versions up to 2.13."""
    optimizer = build([("w", nn.Parameter(torch.ones(3, 3, dtype=dtype)))], lr=0.5)
    assert not optimizer.param_groups[0]["fused"]


def test_model_that_is_cast_without_a_method_is_stepped() -> None:
    model = nn.Linear(3, 2)
    optimizer = FusedSGD(model, lr=0.1, momentum=0.9)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
