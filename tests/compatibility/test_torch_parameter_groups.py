"""torch's generic checks of parameter groups on AdamCPR and SGDCPR."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.helpers.small_problems import (
    assert_right_direction,
    copies,
    linear_problem,
    matrix_with_gradient,
    minimize,
    named,
)

if TYPE_CHECKING:
    from tests.helpers.optimizer_infos import CPROptimizerInfo, Kwargs

each_fused = pytest.mark.parametrize("fused", [None, False, True])


@each_fused
def test_zero_weight_decay_deselects_a_group(info: CPROptimizerInfo, fused: bool | None) -> None:
    for kwargs in info.inputs(fused=fused):
        (weight, bias), closure = linear_problem()
        left_out = nn.Parameter(torch.zeros(2, 2))
        groups = [
            {"params": [weight], "weight_decay": 0.1},
            {"params": [bias, left_out], "weight_decay": 0.0},
        ]
        optimizer = info.optim_cls(groups, **kwargs)
        assert [id(p) for p in optimizer.cpr.parameters] == [id(weight)]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0]
        assert_right_direction(minimize(optimizer, closure), kwargs)


@each_fused
def test_groups_have_their_own_learning_rate(info: CPROptimizerInfo, fused: bool | None) -> None:
    for kwargs in info.inputs(fused=fused, bounds=False):
        params, closure = linear_problem()
        unmoved = matrix_with_gradient()
        before = unmoved.detach().clone()
        kwargs = {"lr": 1e-3, **kwargs}
        groups = [{"params": params, "lr": kwargs.pop("lr")}, {"params": [unmoved]}]
        optimizer = info.optim_cls(groups, lr=1e-28, **kwargs)
        assert_right_direction(minimize(optimizer, closure), kwargs)
        torch.testing.assert_close(unmoved, before)


@each_fused
def test_groups_equal_several_optimizers(info: CPROptimizerInfo, fused: bool | None) -> None:
    settings: list[Kwargs] = [
        {"lr": 0.01, "kappa": "ki0x0p9"},
        {"lr": 0.02, "kappa": "k0p1", "mu": 0.5},
        {"lr": 0.005, "kappa": "ws2", "adaptive": True},
        {"lr": 0.005, "kappa": "ki0x0p9", "regularizer": "l1"},
        {"lr": 0.01, "regularize": False},
    ]
    grouped = [matrix_with_gradient(4, 3) for _ in settings]
    alone = copies(grouped)
    optimizer = info.optim_cls([{"params": [p], **s} for p, s in zip(grouped, settings)], fused=fused)
    others = [
        info.optim_cls([p], **s, fused=fused) for p, s in zip(alone, settings) if "regularize" not in s
    ]
    others.append(info.torch_optimizer(alone[-1:], lr=0.01))
    for _, stepped in itertools.product(range(5), [optimizer, *others]):
        stepped.step()
    torch.testing.assert_close(grouped, alone)


def test_groups_hold_settings_as_plain_values(info: CPROptimizerInfo) -> None:
    from nnunet_cpr import KappaIP

    first, second = matrix_with_gradient(), matrix_with_gradient()
    groups = [
        {"params": [first], "kappa": KappaIP(50), "mu": 0.5},
        {"params": [second], "kappa": "k0p1"},
    ]
    optimizer = info.optim_cls(groups, kappa="ws7", regularizer="l1", adaptive=True)
    settings = [
        [group[key] for key in ("kappa", "regularizer", "mu", "adaptive")]
        for group in optimizer.param_groups
    ]
    assert settings == [["ip50", "l1", 0.5, True], ["k0p1", "l1", 1.0, True]]
    assert [[type(value) for value in group] for group in settings] == [[str, str, float, bool]] * 2


def test_groups_keep_keys_of_schedulers(info: CPROptimizerInfo) -> None:
    keys = {"name": "head", "initial_lr": 0.1, "lr_scale": 0.5, "max_lr": 1.0, "min_lr": 1e-5}
    (group,) = info.optim_cls([{"params": [matrix_with_gradient()], **keys}]).param_groups
    assert {key: group[key] for key in keys} == keys


def test_groups_of_an_optimizer_build_another(info: CPROptimizerInfo) -> None:
    first, second = matrix_with_gradient(), matrix_with_gradient()
    groups = [{"params": [("a", first)], "kappa": "ki0x0p9"}, {"params": [("b", second)], "lr": 0.2}]
    optimizer = info.optim_cls(groups)
    other = info.optim_cls([dict(group) for group in optimizer.param_groups])
    assert [g["kappa"] for g in other.param_groups] == ["ki0x0p9", "ws1000"]
    assert [g["lr"] for g in other.param_groups] == [1e-3, 0.2]


def test_later_weight_decay_is_refused(info: CPROptimizerInfo) -> None:
    optimizer = info.optim_cls([matrix_with_gradient()])
    optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match="weight decay"):
        optimizer.step()


def test_later_settings_of_cpr_are_refused(info: CPROptimizerInfo) -> None:
    for key, value in {"kappa": "ws9", "regularizer": "l1", "mu": 2.0, "adaptive": True}.items():
        p = matrix_with_gradient()
        before = p.detach().clone()
        optimizer = info.optim_cls([p])
        optimizer.param_groups[0][key] = value
        with pytest.raises(ValueError, match=key):
            optimizer.step()
        assert torch.equal(p, before)


def test_later_parameter_groups_are_refused(info: CPROptimizerInfo) -> None:
    optimizer = info.optim_cls([matrix_with_gradient()])
    optimizer.add_param_group({"params": [matrix_with_gradient()]})
    with pytest.raises(ValueError, match=r"group 1: expected no group .*, got a new group; build"):
        optimizer.step()


def test_named_parameters_keep_their_names(info: CPROptimizerInfo) -> None:
    params = [matrix_with_gradient(), matrix_with_gradient(3)]
    (group,) = info.optim_cls(named(params, True)).param_groups
    assert group["param_names"] == ["layer0.weight", "layer1.weight"]
    assert [id(p) for p in group["params"]] == [id(p) for p in params]
    (group,) = info.optim_cls(params).param_groups
    assert "param_names" not in group


def test_parameters_without_names_are_refused_beside_names(info: CPROptimizerInfo) -> None:
    first, second = matrix_with_gradient(), matrix_with_gradient()
    for params in ([("a", first), second], [first, ("a", second)]):
        for optimizer_class in (info.optim_cls, info.torch_cls):
            with pytest.raises(ValueError, match="names"):
                optimizer_class(params)
