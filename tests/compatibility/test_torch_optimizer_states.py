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
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.compatibility.small_problems import (
    assert_all_equal,
    matrix_with_gradient,
    named,
    small_model,
    train,
)
from tests.helpers.client_training import assert_same

if TYPE_CHECKING:
    from tests.compatibility.optimizer_infos import CPROptimizerInfo

each_fused = pytest.mark.parametrize("fused", [False, True])


# State dicts


@pytest.mark.parametrize("is_named", [False, True], ids=["unnamed", "named"])
def test_loaded_state_continues_identically(info: CPROptimizerInfo, is_named: bool) -> None:
    for fused in (True, False):
        for kwargs in info.inputs(fused=fused):
            model = small_model()
            optimizer = info.optim_cls(named(list(model.parameters()), is_named), **kwargs)
            train(model, optimizer, steps=4)
            other = small_model()
            other.load_state_dict(model.state_dict())
            loaded = info.optim_cls(named(list(other.parameters()), is_named), **copy.deepcopy(kwargs))
            saved = copy.deepcopy(optimizer.state_dict())
            loaded.load_state_dict(saved)
            assert_same(saved, optimizer.state_dict())
            for trained, stepped in ((model, optimizer), (other, loaded)):
                train(trained, stepped, steps=4)
            assert_all_equal(other.parameters(), model.parameters())
            assert_same(loaded.state_dict(), optimizer.state_dict())


@each_fused
def test_older_states_can_be_loaded(info: CPROptimizerInfo, fused: bool | None) -> None:
    from tests.compatibility.optimizer_infos import LATER_OPTIONS

    for kwargs in info.inputs(fused=fused):
        model = small_model()
        optimizer = info.optim_cls(model.parameters(), **kwargs)
        train(model, optimizer, steps=3)
        older = copy.deepcopy(optimizer.state_dict())
        for group, key in itertools.product(older["param_groups"], LATER_OPTIONS):
            group.pop(key, None)
        optimizer.load_state_dict(older)
        kappa = optimizer.cpr.kappa
        train(model, optimizer, steps=1)
        if kappa.isfinite().all() and not kwargs.get("adaptive"):
            assert torch.equal(optimizer.cpr.kappa, kappa)


def test_saved_state_reads_back_without_pickled_code(info: CPROptimizerInfo) -> None:
    for kwargs in info.inputs():
        model = small_model()
        optimizer = info.optim_cls(model.named_parameters(), **kwargs)
        train(model, optimizer, steps=3)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        assert_same(torch.load(file, weights_only=True), optimizer.state_dict())


@pytest.mark.parametrize(("saves_fused", "loads_fused"), [(True, False), (False, True)])
def test_state_crosses_implementations(
    info: CPROptimizerInfo, saves_fused: bool, loads_fused: bool
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


def test_state_dict_hooks_run_in_order(info: CPROptimizerInfo) -> None:
    optimizer = info.optim_cls([matrix_with_gradient()], **info.bounded)
    optimizer.register_state_dict_pre_hook(add_mark)
    optimizer.register_state_dict_post_hook(move_mark)
    optimizer.step()
    state_dict = optimizer.state_dict()
    assert state_dict["was_marked"] is True and "mark" not in state_dict["state"]
    seen: list[bool] = []
    optimizer.register_load_state_dict_pre_hook(set_lr_in_place)
    optimizer.register_load_state_dict_pre_hook(set_lr_in_copy, prepend=True)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("cpr" in state))
    optimizer.register_load_state_dict_post_hook(record_lr)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == optimizer.state["loaded_lr"] == 0.002 and seen == [True]


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
