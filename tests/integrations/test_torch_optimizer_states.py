"""torch's generic checks of state dicts and hooks on AdamCPR and SGDCPR."""

from __future__ import annotations

import copy
import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.integrations.small_problems import (
    matrix_with_gradient,
    small_model,
    train,
)

if TYPE_CHECKING:
    from tests.integrations.optimizer_infos import CPROptimizerInfo

each_fused = pytest.mark.parametrize("fused", [False, True])


# State dicts


@each_fused
def test_older_states_can_be_loaded(info: CPROptimizerInfo, fused: bool | None) -> None:
    from tests.integrations.optimizer_infos import LATER_OPTIONS

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


def test_state_dict_hooks_run_in_order(info: CPROptimizerInfo) -> None:
    optimizer = info.optim_cls([matrix_with_gradient()], **info.bounded)
    optimizer.register_state_dict_pre_hook(lambda own: own.state.update(mark=1))
    optimizer.register_state_dict_post_hook(
        lambda _, state: {**state, "was_marked": state["state"].pop("mark", None) == 1}
    )
    optimizer.step()
    state_dict = optimizer.state_dict()
    assert state_dict["was_marked"] is True and "mark" not in state_dict["state"]
    seen: list[bool] = []
    loaded: list[float] = []

    def set_lr_in_copy(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**copy.deepcopy(state), "param_groups": [{**state["param_groups"][0], "lr": 0.003}]}

    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: state["param_groups"][0].update(lr=0.002)
    )
    optimizer.register_load_state_dict_pre_hook(set_lr_in_copy, prepend=True)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("cpr" in state))
    optimizer.register_load_state_dict_post_hook(lambda own: loaded.append(own.param_groups[0]["lr"]))
    optimizer.load_state_dict(state_dict)
    assert loaded == [optimizer.param_groups[0]["lr"]] == [0.002] and seen == [True]


@each_fused
def test_all_step_hooks_run_once_in_order(info: CPROptimizerInfo, fused: bool | None) -> None:
    order = ["global pre", "pre", "post", "global post"]
    calls: list[str] = []
    for kwargs in [*info.inputs(fused=fused), {**info.bounded, "fused": fused}]:
        p = matrix_with_gradient()
        optimizer, other = info.optim_cls([p], **kwargs), torch.optim.SGD([p])
        calls.clear()
        hooks = [
            (register_optimizer_step_pre_hook, "global pre"),
            (register_optimizer_step_post_hook, "global post"),
            *((own.register_step_pre_hook, "pre") for own in (optimizer, other)),
            *((own.register_step_post_hook, "post") for own in (optimizer, other)),
        ]
        with ExitStack() as handles:
            for register, name in hooks:
                handles.enter_context(register(lambda *_, name=name: calls.append(name)))
            optimizer.step()
            other.step()
            optimizer.step(lambda: None)
        assert calls == 3 * order
        optimizer.step()
        assert calls == 3 * order
