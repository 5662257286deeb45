"""torch's generic optimizer checks (its ``TestOptimRenewed``) on AdamCPR and SGDCPR."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from nnunet_cpr import SGDCPR
from tests.integrations.small_problems import (
    assert_all_equal,
    backward,
    linear_problem,
    matrix_with_gradient,
    small_model,
    train,
)

if TYPE_CHECKING:
    from tests.integrations.optimizer_infos import CPROptimizerInfo

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Unfused steps round intermediate results of half-precision parameters, fused ones do not.
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}

each_fused = pytest.mark.parametrize("fused", [False, True])


# Construction


def test_wrong_arguments_are_refused(info: CPROptimizerInfo) -> None:
    for error_type, regex, params, kwargs in info.errors():
        given = [nn.Parameter(torch.randn(2, 3))] if params is None else params
        if issubclass(error_type, Warning):
            with pytest.warns(error_type, match=regex):
                info.optim_cls(given, **kwargs)
        else:
            with pytest.raises(error_type, match=regex) as caught:
                info.optim_cls(given, **kwargs)
            assert "\n" not in str(caught.value)


# Which implementation runs


def test_fused_steps_are_the_default(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs():
        (group,) = info.optim_cls([matrix_with_gradient()], **kwargs).param_groups
        assert group["fused"] is True
        assert not group["foreach"]
        assert not group["differentiable"]


def test_gradient_scaling_is_announced_for_explicit_fused_steps(info: CPROptimizerInfo) -> None:
    for fused, announced in ((None, False), (False, False), (True, True)):
        optimizer = info.optim_cls([matrix_with_gradient()], fused=fused)
        assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) is announced


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_fused_steps_match_forloop(info: CPROptimizerInfo, dtype: torch.dtype) -> None:
    if info.name == "SGDCPR" and dtype.itemsize < 4 and TORCH_VERSION < (2, 7):
        pytest.skip("the fused SGD step of torch 2.6 is wrong in half precision")
    for kwargs in info.inputs(dtype):
        models = [small_model(dtype), small_model(dtype)]
        extras = [nn.Parameter(torch.ones((), dtype=dtype)) for _ in models]
        optimizers = [
            info.optim_cls([*model.parameters(), extra], **{**copy.deepcopy(kwargs), "fused": fused})
            for model, extra, fused in zip(models, extras, (False, True))
        ]
        for step in range(7):
            for model, extra, optimizer in zip(models, extras, optimizers):
                optimizer.zero_grad()
                model[2].requires_grad_(step not in (3, 4))  # frozen for a while
                if step != 2:
                    backward(model, 1 + 0.1 * step)
                    extra.grad = torch.full_like(extra, 0.5)
                optimizer.step()
        saved = [optimizer.state_dict() for optimizer in optimizers]
        results = [
            [*model.parameters(), extra, state["state"], state["cpr"]["state"]]
            for model, extra, state in zip(models, extras, saved)
        ]
        torch.testing.assert_close(*results, **TOLERANCES[dtype], equal_nan=True)


@pytest.mark.parametrize("fused", [False, True])
def test_unbounded_steps_equal_those_of_torch(info: CPROptimizerInfo, fused: bool) -> None:
    from tests.integrations.optimizer_infos import UNREACHED

    for kwargs in info.inputs(fused=fused, bounds=False):
        models = [small_model(torch.float64), small_model(torch.float64)]
        kwargs = {"lr": 1e-3, **kwargs}
        ours = info.optim_cls(models[0].parameters(), **copy.deepcopy(kwargs), kappa=UNREACHED)
        theirs = info.torch_optimizer(models[1].parameters(), **kwargs)
        for model, optimizer in zip(models, (ours, theirs)):
            train(model, optimizer, steps=6)
        tolerance = {"rtol": 1e-10, "atol": 1e-11} if fused else {"rtol": 0.0, "atol": 0.0}
        ours_after, theirs_after = (list(model.parameters()) for model in models)
        torch.testing.assert_close(ours_after, theirs_after, **tolerance)


# Steps


@pytest.mark.parametrize(
    ("fused", "contiguous"),
    [(True, True), (False, True), (None, False)],
    ids=["fused", "unfused", "strided"],
)
def test_loss_moves_in_the_right_direction(
    info: CPROptimizerInfo, fused: bool | None, contiguous: bool
) -> None:
    for kwargs in info.inputs(fused=fused):
        params, closure = linear_problem(contiguous)
        optimizer = info.optim_cls(params, **kwargs)
        assert bool(optimizer.param_groups[0]["fused"]) is bool(fused)
        initial = closure().item()
        for _ in range(20):
            optimizer.step(closure)
        change = closure().item() - initial
        assert change > 0 if kwargs.get("maximize") else change < 0, kwargs


@each_fused
def test_step_without_gradients_is_a_noop(info: CPROptimizerInfo, fused: bool | None) -> None:
    params = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 3), requires_grad=False)]
    before = copy.deepcopy(params)
    for kwargs in info.inputs(fused=fused):
        optimizer = info.optim_cls(params, **kwargs)
        assert optimizer.step(lambda: 1.5) == 1.5
        assert_all_equal(params, before)


@each_fused
def test_closure_runs_once_with_gradients_enabled(info: CPROptimizerInfo, fused: bool | None) -> None:
    params, compute = linear_problem()
    others, recompute = linear_problem()
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return compute()

    optimizer = info.optim_cls(params, **info.bounded, fused=fused)
    twin = info.optim_cls(others, **info.bounded, fused=fused)
    with torch.no_grad():
        losses = [optimizer.step(closure) for _ in range(4)]
        losses.append(optimizer.step(closure=closure))
    assert calls == [True] * 5
    for loss in losses:
        assert torch.equal(loss, recompute())
        assert twin.step() is None
    assert_all_equal(params, others)


@pytest.mark.parametrize("fused", [None, False])
def test_sparse_gradients_equal_dense_ones(fused: bool | None) -> None:
    for kwargs in ({}, {"momentum": 0, "nesterov": False, "maximize": True}, {"kappa": "ki0x0p9"}):
        sparse, dense = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.empty(4, 3))
        dense.data.copy_(sparse.data)
        optimizers = [SGDCPR([p], lr=0.01, **kwargs, fused=fused) for p in (sparse, dense)]
        for step in range(6):
            rows = torch.tensor([[step % 4, step % 4]])  # not coalesced
            values = torch.randn(2, 3)
            sparse.grad = torch.sparse_coo_tensor(rows, values, (4, 3), check_invariants=True)
            dense.grad = sparse.grad.to_dense()
            for optimizer in optimizers:
                optimizer.step()
            torch.testing.assert_close(sparse, dense)


# Parameter groups


# Printing


def test_optimizers_can_be_printed(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs():
        text = repr(info.optim_cls([matrix_with_gradient()], **kwargs))
        assert text.startswith(f"{info.name} (\nParameter Group 0\n")
        assert "kappa: " in text and "lr: " in text
