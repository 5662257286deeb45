"""torch's generic optimizer checks (its ``TestOptimRenewed``) on AdamCPR and SGDCPR."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.small_problems import (
    assert_all_equal,
    assert_equal,
    assert_right_direction,
    backward,
    copies,
    linear_problem,
    matrix_with_gradient,
    minimize,
    small_model,
    train,
)

if TYPE_CHECKING:
    from tests.helpers.optimizer_infos import CPROptimizerInfo

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Unfused steps round intermediate results of half-precision parameters, fused ones do not.
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}

each_fused = pytest.mark.parametrize("fused", [None, False, True])


# Construction


@each_fused
def test_infos_leave_implementation_to_the_checks(info: CPROptimizerInfo, fused: bool | None) -> None:
    for optimizer_input in info.optim_inputs_func("cpu"):
        assert optimizer_input.kwargs.keys().isdisjoint({"foreach", "fused", "differentiable"})
    for kwargs in info.inputs(fused=fused):
        assert kwargs["fused"] is fused


def test_torchs_test_utilities_leave_flags_settable(info: CPROptimizerInfo) -> None:
    assert not torch.backends.flags_frozen()


def test_wrong_arguments_are_refused(info: CPROptimizerInfo) -> None:
    from tests.helpers.optimizer_infos import OptimizerErrorEnum

    for error in info.optim_error_inputs_func("cpu", torch.float32):
        wrong = error.optimizer_error_input
        params = [nn.Parameter(torch.randn(2, 3))] if wrong.params is None else wrong.params
        if issubclass(error.error_type, Warning):
            with pytest.warns(error.error_type, match=error.error_regex):
                info.optim_cls(params, **wrong.kwargs)
        elif error.error_on is OptimizerErrorEnum.STEP_ERROR:
            optimizer = info.optim_cls(params, **wrong.kwargs)
            with pytest.raises(error.error_type, match=error.error_regex):
                optimizer.step()
        else:
            with pytest.raises(error.error_type, match=error.error_regex) as caught:
                info.optim_cls(params, **wrong.kwargs)
            assert "\n" not in str(caught.value)


def test_weight_decay_of_zero_is_accepted(info: CPROptimizerInfo) -> None:
    optimizer = info.optim_cls([matrix_with_gradient()], weight_decay=0)
    assert optimizer.param_groups[0]["weight_decay"] == 0


def test_complex_parameters_are_refused(info: CPROptimizerInfo) -> None:
    params = [nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))]
    for kwargs in info.inputs():
        with pytest.raises(TypeError, match="complex"):
            info.optim_cls(params, **kwargs)


def test_generators_of_parameters_are_accepted(info: CPROptimizerInfo) -> None:
    model = small_model()
    for params in (model.parameters(), model.named_parameters(), model):
        optimizer = info.optim_cls(params)
        assert [p for group in optimizer.param_groups for p in group["params"]] == list(
            model.parameters()
        )


def test_no_parameter_to_regularize_warns_and_trains(info: CPROptimizerInfo) -> None:
    vectors = [matrix_with_gradient(4), matrix_with_gradient(1)]
    others = copies(vectors)
    with pytest.warns(UserWarning, match="no parameter to regularize"):
        optimizer = info.optim_cls(vectors)
    twin = info.torch_optimizer(others, lr=1e-3)
    for _ in range(3):
        optimizer.step()
        twin.step()
    torch.testing.assert_close(vectors, others)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_defaults_are_those_documented(info: CPROptimizerInfo) -> None:
    (group,) = info.optim_cls([matrix_with_gradient()]).param_groups
    assert group["lr"] == 1e-3
    expected = {**info.torch_cls([matrix_with_gradient()], lr=1e-3).defaults, **info.torch_defaults}
    assert {key: group[key] for key in expected if key != "fused"} == {
        key: value for key, value in expected.items() if key != "fused"
    }
    settings = {"kappa": "ws1000", "regularizer": "l2", "mu": 1.0, "adaptive": False}
    assert {key: group[key] for key in settings} == settings


def test_optimizers_have_the_state_of_their_torch_class(info: CPROptimizerInfo) -> None:
    ours, theirs = matrix_with_gradient(), matrix_with_gradient()
    optimizer, twin = info.optim_cls([ours]), info.torch_optimizer([theirs], lr=1e-3)
    assert isinstance(optimizer, info.torch_cls)
    optimizer.step()
    twin.step()
    assert optimizer.state[ours].keys() == twin.state[theirs].keys()
    assert twin.param_groups[0].keys() <= optimizer.param_groups[0].keys()
    assert twin.defaults.keys() <= optimizer.defaults.keys()


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


def test_strided_parameters_get_unfused_steps(info: CPROptimizerInfo) -> None:
    params, _ = linear_problem(contiguous=False)
    (group,) = info.optim_cls(params).param_groups
    assert not group["fused"]


def test_permuted_parameters_get_fused_steps(info: CPROptimizerInfo) -> None:
    kernel = torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    params = [nn.Parameter(kernel), nn.Parameter(torch.randn(3, 5).t())]
    others = [nn.Parameter(p.detach().contiguous()) for p in params]
    optimizer = info.optim_cls(params, **info.bounded)
    twin = info.optim_cls(others, **info.bounded, fused=False)
    assert optimizer.param_groups[0]["fused"]
    for _ in range(4):
        for p, other in zip(params, others):
            p.grad = torch.randn(p.shape)
            other.grad = p.grad.clone()
        optimizer.step()
        twin.step()
    torch.testing.assert_close(params, others)


def test_fused_step_refuses_meta_parameters(info: CPROptimizerInfo) -> None:
    model = small_model().to("meta")
    optimizer = info.optim_cls(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.step()


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
        assert_equal(
            [*models[1].parameters(), extras[1]],
            [*models[0].parameters(), extras[0]],
            **TOLERANCES[dtype],
        )
        states = [optimizer.state_dict() for optimizer in optimizers]
        for state in states:
            for group in state["param_groups"]:
                del group["fused"]
        assert_equal(*states, **TOLERANCES[dtype])


@pytest.mark.parametrize("fused", [False, True])
def test_unbounded_steps_equal_those_of_torch(info: CPROptimizerInfo, fused: bool) -> None:
    from tests.helpers.optimizer_infos import UNREACHED

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


@each_fused
def test_mixed_dtypes_step_as_if_alone(info: CPROptimizerInfo, fused: bool | None) -> None:
    dtypes = [torch.float64, torch.float32]
    mixed = [matrix_with_gradient(4, 3, dtype=dtype) for dtype in dtypes]
    alone = copies(mixed)
    optimizers = [
        info.optim_cls(params, **info.bounded, fused=fused) for params in (mixed, alone[:1], alone[1:])
    ]
    for _, optimizer in itertools.product(range(5), optimizers):
        optimizer.step()
    torch.testing.assert_close(mixed, alone)


@pytest.mark.parametrize("default", [torch.float64, torch.float16], ids=str)
def test_default_dtype_does_not_change_steps(info: CPROptimizerInfo, default: torch.dtype) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = small_model(torch.float32)
    train(expected, info.optim_cls(expected.parameters(), **info.bounded), steps=5)
    model = small_model(torch.float32)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        train(model, info.optim_cls(model.parameters(), **info.bounded), steps=5)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(
        list(model.parameters()), list(expected.parameters()), rtol=1e-3, atol=1e-4
    )


# Steps


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("fused", [None, False])
def test_loss_moves_in_the_right_direction(
    info: CPROptimizerInfo, fused: bool | None, contiguous: bool, scheduled: bool
) -> None:
    for makers in info.scheduler_inputs if scheduled else ([],):
        for kwargs in info.inputs(fused=fused):
            params, closure = linear_problem(contiguous)
            optimizer = info.optim_cls(params, **kwargs)
            change = minimize(optimizer, closure, [make(optimizer) for make in makers])
            assert_right_direction(change, kwargs)


def test_scheduled_parameter_groups_reduce_the_loss(info: CPROptimizerInfo) -> None:
    for makers in info.scheduler_inputs:
        (weight, bias), closure = linear_problem()
        optimizer = info.optim_cls([{"params": [weight]}, {"params": [bias], "lr": 0.005}])
        assert minimize(optimizer, closure, [make(optimizer) for make in makers]) < 0


@each_fused
def test_tensor_learning_rate_equals_float(info: CPROptimizerInfo, fused: bool | None) -> None:
    for kwargs in info.inputs(fused=fused):
        runs = []
        for lr in (2.0**-9, torch.tensor(2.0**-9)):
            params, closure = linear_problem()
            optimizer = info.optim_cls(params, **{**kwargs, "lr": lr})
            for _ in range(5):
                optimizer.step(closure)
            runs.append(params)
        torch.testing.assert_close(*runs)


@each_fused
def test_changed_tensor_learning_rate_takes_effect(info: CPROptimizerInfo, fused: bool | None) -> None:
    p, lr = matrix_with_gradient(), torch.tensor(0.1)
    optimizer = info.optim_cls([p], lr=lr, fused=fused)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)


@each_fused
def test_step_without_gradients_is_a_noop(info: CPROptimizerInfo, fused: bool | None) -> None:
    params = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 3), requires_grad=False)]
    before = copies(params)
    for kwargs in info.inputs(fused=fused):
        optimizer = info.optim_cls(params, **kwargs)
        assert optimizer.step(lambda: 1.5) == 1.5
        assert_all_equal(params, before)


@each_fused
def test_step_with_zero_gradients_is_a_noop(info: CPROptimizerInfo, fused: bool | None) -> None:
    for kwargs in info.inputs(fused=fused, bounds=False):
        p = nn.Parameter(torch.randn(5, 1))
        p.grad = torch.zeros_like(p)
        before = p.detach().clone()
        info.optim_cls([p], **kwargs).step()
        assert torch.equal(p, before)


@each_fused
def test_step_leaves_gradients_unchanged(info: CPROptimizerInfo, fused: bool | None) -> None:
    for kwargs in info.inputs(fused=fused):
        params = [matrix_with_gradient(), matrix_with_gradient(4)]
        grads = [p.grad for p in params]
        before = [grad.clone() for grad in grads if grad is not None]
        optimizer = info.optim_cls(params, **kwargs)
        for _ in range(3):
            optimizer.step()
        assert all(p.grad is grad for p, grad in zip(params, grads))
        assert_all_equal([p.grad for p in params], before)


@each_fused
def test_gradients_of_any_layout_give_the_same_step(info: CPROptimizerInfo, fused: bool | None) -> None:
    params = [matrix_with_gradient(4, 3), matrix_with_gradient(2, 3, 3, 3)]
    others = copies(params)
    optimizer = info.optim_cls(params, **info.bounded, fused=fused)
    twin = info.optim_cls(others, **info.bounded, fused=fused)
    for _ in range(3):
        params[0].grad = others[0].grad.t().contiguous().t()
        params[1].grad = others[1].grad.contiguous(memory_format=torch.channels_last)
        optimizer.step()
        twin.step()
        assert_all_equal([p.grad for p in params], [p.grad for p in others])
    torch.testing.assert_close(params, others)


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


@each_fused
def test_empty_parameters_step_along(info: CPROptimizerInfo, fused: bool | None) -> None:
    params = [matrix_with_gradient(), matrix_with_gradient(0, 4), matrix_with_gradient(0)]
    others = copies(params)
    optimizer = info.optim_cls(params, **info.bounded, fused=fused)
    twin = info.optim_cls(others[:1], **info.bounded, fused=fused)
    for _ in range(3):
        optimizer.step()
        twin.step()
    assert_all_equal(params, others)


@each_fused
def test_gradient_scaler_steps_equal_those_of_torch(info: CPROptimizerInfo, fused: bool | None) -> None:
    models = [small_model(torch.float64), small_model(torch.float64)]
    optimizers = [
        info.optim_cls(models[0].parameters(), lr=0.01, fused=fused),
        info.torch_optimizer(models[1].parameters(), lr=0.01, fused=fused),
    ]
    for model, optimizer in zip(models, optimizers):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        for step in range(6):
            backward(model, 1 + 0.1 * step)
            for p in model.parameters():
                p.grad.mul_(scaler.get_scale() if step != 2 else math.inf)
            scaler.scale(torch.ones(()))  # starts the scaler
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(*(list(model.parameters()) for model in models))
    assert optimizers[0].cpr.step_count == 5


def test_infinite_gradients_skip_the_step(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs(fused=True):
        for scale in (None, torch.ones(1)):
            params = [matrix_with_gradient(), matrix_with_gradient()]
            before = copies(params)
            optimizer = info.optim_cls(params, **kwargs)
            optimizer.grad_scale, optimizer.found_inf = scale, torch.ones(())
            optimizer.step()
            assert_all_equal(params, before)
            assert optimizer.cpr.step_count == 0
            for state in optimizer.state.values():
                assert float(state.get("step", 0)) == 0
            optimizer.found_inf.zero_()
            optimizer.step()
            assert optimizer.cpr.step_count == 1
            assert not torch.equal(params[0], before[0])


@pytest.mark.parametrize("fused", [None, False])
def test_sparse_gradients_equal_dense_ones(fused: bool | None) -> None:
    from tests.helpers.optimizer_infos import optimizer_infos

    (info,) = (info for info in optimizer_infos if info.supports_sparse)
    for kwargs in ({}, {"momentum": 0, "nesterov": False, "maximize": True}, info.bounded):
        sparse, dense = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.empty(4, 3))
        dense.data.copy_(sparse.data)
        optimizers = [
            info.optim_cls([p], **{"lr": 0.01, **kwargs}, fused=fused) for p in (sparse, dense)
        ]
        for step in range(6):
            rows = torch.tensor([[step % 4, step % 4]])  # not coalesced
            values = torch.randn(2, 3)
            sparse.grad = torch.sparse_coo_tensor(rows, values, (4, 3), check_invariants=True)
            dense.grad = sparse.grad.to_dense()
            for optimizer in optimizers:
                optimizer.step()
            torch.testing.assert_close(sparse, dense)


def test_sparse_gradients_of_embeddings_train() -> None:
    from tests.helpers.optimizer_infos import optimizer_infos

    (info,) = (info for info in optimizer_infos if info.supports_sparse)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
    optimizer = info.optim_cls(model, lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.tensor([0, 2, 2])).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_every_parameter_gets_state(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs():
        model = small_model()
        optimizer = info.optim_cls(model.parameters(), **kwargs)
        train(model, optimizer, steps=1)
        if kwargs.get("momentum") != 0:
            assert set(optimizer.state) == set(model.parameters())
        assert all(optimizer.state.values())


# Printing and copying


def test_optimizers_can_be_printed(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs():
        text = repr(info.optim_cls([matrix_with_gradient()], **kwargs))
        assert text.startswith(f"{info.name} (\nParameter Group 0\n")
        assert "kappa: " in text and "lr: " in text


def test_optimizers_refuse_to_be_copied(info: CPROptimizerInfo) -> None:
    optimizer = info.optim_cls([matrix_with_gradient()])
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict") as caught:
            copied(optimizer)
        assert "\n" not in str(caught.value)
    optimizer.step()
