"""torch's generic checks of state dicts and hooks on AdamCPR and SGDCPR."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.helpers.small_problems import (
    assert_all_equal,
    assert_equal,
    matrix_with_gradient,
    named,
    small_model,
    train,
)

if TYPE_CHECKING:
    from tests.helpers.optimizer_infos import CPROptimizerInfo

each_fused = pytest.mark.parametrize("fused", [None, False, True])


# State dicts


@pytest.mark.parametrize("is_named", [False, True], ids=["unnamed", "named"])
def test_loaded_state_continues_identically(info: CPROptimizerInfo, is_named: bool) -> None:
    for fused in (None, False):
        for kwargs in info.inputs(fused=fused):
            model = small_model()
            optimizer = info.optim_cls(named(list(model.parameters()), is_named), **kwargs)
            train(model, optimizer, steps=4)
            other = small_model()
            other.load_state_dict(model.state_dict())
            loaded = info.optim_cls(named(list(other.parameters()), is_named), **copy.deepcopy(kwargs))
            saved = copy.deepcopy(optimizer.state_dict())
            loaded.load_state_dict(saved)
            assert_equal(saved, optimizer.state_dict())
            for trained, stepped in ((model, optimizer), (other, loaded)):
                train(trained, stepped, steps=4)
            assert_all_equal(other.parameters(), model.parameters())
            assert_equal(loaded.state_dict(), optimizer.state_dict())
            if is_named:
                assert loaded.state_dict()["param_groups"][0]["param_names"] == [
                    f"layer{i}.weight" for i in range(4)
                ]


def test_repeated_groups_have_the_same_state(info: CPROptimizerInfo) -> None:
    optimizer = info.optim_cls([matrix_with_gradient(), matrix_with_gradient(3)])
    before = optimizer.state_dict()["param_groups"][-1]
    optimizer.param_groups.extend(optimizer.param_groups)
    assert optimizer.state_dict()["param_groups"][-1] == before


def test_state_of_a_model_fits_its_parameters(info: CPROptimizerInfo) -> None:
    model = small_model()
    kinds: list[Callable[[], Any]] = [
        lambda: model,
        model.named_parameters,
        lambda: [{"params": model.named_parameters()}],
    ]
    for save, load in itertools.product(kinds, kinds):
        optimizer = info.optim_cls(save(), **info.bounded)
        train(model, optimizer, steps=2)
        loaded = info.optim_cls(load(), **info.bounded)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert torch.equal(loaded.cpr.kappa, optimizer.cpr.kappa)
        train(model, loaded, steps=1)


@each_fused
def test_older_states_can_be_loaded(info: CPROptimizerInfo, fused: bool | None) -> None:
    for kwargs in info.inputs(fused=fused):
        model = small_model()
        optimizer = info.optim_cls(model.parameters(), **kwargs)
        train(model, optimizer, steps=3)
        older = copy.deepcopy(optimizer.state_dict())
        for group, key in itertools.product(older["param_groups"], info.not_og_supported_flags):
            group.pop(key, None)
        optimizer.load_state_dict(older)
        kappa = optimizer.cpr.kappa
        train(model, optimizer, steps=1)
        if kappa.isfinite().all() and not kwargs.get("adaptive"):
            assert torch.equal(optimizer.cpr.kappa, kappa)


@each_fused
def test_numeric_step_counts_can_be_loaded(info: CPROptimizerInfo, fused: bool | None) -> None:
    for kwargs in info.inputs(fused=fused):
        params = [matrix_with_gradient(), matrix_with_gradient()]
        optimizer = info.optim_cls(params, **kwargs)
        for _ in range(3):
            optimizer.step()
        state_dict = copy.deepcopy(optimizer.state_dict())
        for state in state_dict["state"].values():
            if "step" in state:
                state["step"] = state["step"].item()
        optimizer.load_state_dict(state_dict)
        optimizer.step()
        for state in optimizer.state.values():
            assert float(state.get("step", 4)) == 4


@each_fused
@pytest.mark.parametrize("is_named", [False, True], ids=["unnamed", "named"])
def test_saved_state_reads_back_without_pickled_code(
    info: CPROptimizerInfo, is_named: bool, fused: bool | None
) -> None:
    for kwargs in info.inputs(fused=fused):
        model = small_model()
        optimizer = info.optim_cls(named(list(model.parameters()), is_named), **kwargs)
        train(model, optimizer, steps=3)
        expected = optimizer.state_dict()
        for weights_only in (True, False):
            file = io.BytesIO()
            torch.save(expected, file)
            file.seek(0)
            assert_equal(torch.load(file, weights_only=weights_only), expected)


@pytest.mark.parametrize("loads_fused", [None, False, True])
@pytest.mark.parametrize("saves_fused", [None, False, True])
def test_state_crosses_implementations(
    info: CPROptimizerInfo, saves_fused: bool | None, loads_fused: bool | None
) -> None:
    model = small_model(torch.float64)
    optimizer = info.optim_cls(model.parameters(), **info.bounded, fused=saves_fused)
    train(model, optimizer, steps=3)
    other = small_model(torch.float64)
    other.load_state_dict(model.state_dict())
    loaded = info.optim_cls(other.parameters(), **info.bounded, fused=loads_fused)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for trained, stepped in ((model, optimizer), (other, loaded)):
        train(trained, stepped, steps=3)
    torch.testing.assert_close(
        list(other.parameters()), list(model.parameters()), rtol=1e-12, atol=1e-14
    )


def test_loaded_state_is_a_copy(info: CPROptimizerInfo) -> None:
    first, second = matrix_with_gradient(), matrix_with_gradient()
    optimizer = info.optim_cls([first], **info.bounded)
    optimizer.step()
    saved = optimizer.state_dict()
    expected = copy.deepcopy(saved)
    other = info.optim_cls([second], **info.bounded)
    other.load_state_dict(saved)
    for _ in range(2):
        other.step()
    assert_equal(saved, expected)


def test_state_without_cpr_is_refused(info: CPROptimizerInfo) -> None:
    params = [matrix_with_gradient()]
    optimizer = info.optim_cls(params)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="without CPR"):
        optimizer.load_state_dict(info.torch_optimizer(params, lr=0.5).state_dict())
    assert_equal(optimizer.state_dict(), before)


def test_torch_optimizer_loads_the_state(info: CPROptimizerInfo) -> None:
    ours, theirs = matrix_with_gradient(), matrix_with_gradient()
    optimizer, other = info.optim_cls([ours]), info.torch_optimizer([theirs], lr=0.5)
    optimizer.step()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == 1e-3
    assert_equal(other.state[theirs], optimizer.state[ours])
    other.step()


def test_extra_state_of_users_is_kept(info: CPROptimizerInfo) -> None:
    p = matrix_with_gradient()
    optimizer = info.optim_cls([p])
    optimizer.step()
    optimizer.state[p]["tag"] = 7
    optimizer.state["global"] = 3
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
    assert optimizer.state[p]["tag"] == 7
    assert optimizer.state["global"] == 3


# Hooks


def add_mark(optimizer: Optimizer) -> None:
    optimizer.state["mark"] = 1


def move_mark(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["was_marked"] = state_dict["state"].pop("mark", None) == 1
    return state_dict


def set_lr_in_place(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["lr"] = 0.002


def set_lr_in_copy(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict = copy.deepcopy(state_dict)
    state_dict["param_groups"][0]["lr"] = 0.003
    return state_dict


def record_lr(optimizer: Optimizer) -> None:
    optimizer.state["loaded_lr"] = optimizer.param_groups[0]["lr"]


def test_state_dict_pre_hook_runs_before(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs():
        optimizer = info.optim_cls([matrix_with_gradient()], **kwargs)
        optimizer.register_state_dict_pre_hook(add_mark)
        assert optimizer.state_dict()["state"]["mark"] == 1


def test_state_dict_post_hook_replaces_the_dict(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs():
        optimizer = info.optim_cls([matrix_with_gradient()], **kwargs)
        optimizer.register_state_dict_post_hook(move_mark)
        assert optimizer.state_dict()["was_marked"] is False
        optimizer.register_state_dict_pre_hook(add_mark)
        state_dict = optimizer.state_dict()
        assert state_dict["was_marked"] is True
        assert "mark" not in state_dict["state"]


def test_load_pre_hooks_run_in_order(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs():
        optimizer = info.optim_cls([matrix_with_gradient()], **kwargs)
        state_dict = optimizer.state_dict()
        optimizer.register_load_state_dict_pre_hook(set_lr_in_place)
        optimizer.load_state_dict(state_dict)
        assert optimizer.param_groups[0]["lr"] == 0.002
        optimizer.register_load_state_dict_pre_hook(set_lr_in_copy, prepend=True)
        optimizer.load_state_dict(state_dict)
        assert optimizer.param_groups[0]["lr"] == 0.002


def test_load_post_hook_sees_the_loaded_state(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs():
        optimizer = info.optim_cls([matrix_with_gradient()], **{**kwargs, "lr": 0.01})
        optimizer.register_load_state_dict_post_hook(record_lr)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state["loaded_lr"] == 0.01
        optimizer.register_load_state_dict_pre_hook(set_lr_in_copy)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state["loaded_lr"] == 0.003


def test_hooks_of_a_saved_state_see_cpr(info: CPROptimizerInfo) -> None:
    optimizer = info.optim_cls([matrix_with_gradient()], **info.bounded)
    optimizer.step()
    seen: list[bool] = []
    optimizer.register_state_dict_post_hook(lambda _, state_dict: seen.append("cpr" in state_dict))
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append("cpr" in state_dict))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [True, True]


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_step_hooks_run_until_removed(info: CPROptimizerInfo, kind: str) -> None:
    for kwargs in info.inputs():
        optimizer = info.optim_cls([nn.Parameter(torch.ones(2, 2))], **kwargs)
        calls: list[bool] = []

        def hook(*args: Any, calls: list[bool] = calls, optimizer: Any = optimizer) -> None:
            calls.append(args[0] is optimizer)

        handle = getattr(optimizer, f"register_step_{kind}_hook")(hook)
        optimizer.step()
        optimizer.step(None)
        assert calls == [True, True]
        handle.remove()
        optimizer.step()
        assert len(calls) == 2


@contextmanager
def step_hooks(calls: list[str], *optimizers: Optimizer) -> Iterator[None]:
    def call(name: str) -> Callable[..., None]:
        return lambda *args: calls.append(name)

    handles = [
        register_optimizer_step_pre_hook(call("global pre")),
        register_optimizer_step_post_hook(call("global post")),
    ]
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(call("pre")))
        handles.append(optimizer.register_step_post_hook(call("post")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@each_fused
def test_all_step_hooks_run_once_in_order(info: CPROptimizerInfo, fused: bool | None) -> None:
    order = ["global pre", "pre", "post", "global post"]
    for kwargs in [*info.inputs(fused=fused), {**info.bounded, "fused": fused}]:
        p = matrix_with_gradient()
        optimizer, other = info.optim_cls([p], **kwargs), torch.optim.SGD([p])
        calls: list[str] = []
        with step_hooks(calls, optimizer, other):
            optimizer.step()
            other.step()
            optimizer.step(lambda: None)
        assert calls == 3 * order
        optimizer.step()
        assert calls == 3 * order


def test_step_pre_hook_may_change_arguments(info: CPROptimizerInfo) -> None:
    optimizer = info.optim_cls([matrix_with_gradient()])
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((args[0], lambda: 7.0), {}))
    assert optimizer.step() == 7.0


def test_hooks_may_change_gradients(info: CPROptimizerInfo) -> None:
    p = matrix_with_gradient()
    before = p.detach().clone()
    optimizer = info.optim_cls([p])
    optimizer.register_step_pre_hook(lambda *args: optimizer.zero_grad(set_to_none=False))
    optimizer.step()
    assert torch.equal(p, before)
