"""States that are loaded into an optimizer whose parameters are in another order."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, MuonCPR
from nnunet_cpr.baselines import DecoupledDecay, amos
from nnunet_cpr.optimizers import FusedAdam, FusedSGD, Muon
from tests.helpers.matrices import matrix, set_gradients

Named = list[tuple[str, nn.Parameter]]
Build = Callable[[Any], torch.optim.Optimizer]

BUILDS: dict[str, Build] = {
    "SGDCPR": SGDCPR,
    "AdamCPR": AdamCPR,
    "MuonCPR": functools.partial(MuonCPR, ns_dtype="float64"),
    "FusedSGD": functools.partial(FusedSGD, momentum=0.9),
    "FusedAdam": FusedAdam,
    "Muon": functools.partial(Muon, ns_dtype="float64"),
    "amos": amos,
    "amos with decay": functools.partial(amos, weight_decay=0.1),
    "CPR on AdamW": lambda named: CPR(named).attach(torch.optim.AdamW(named, weight_decay=0.0)),
    "DecoupledDecay on SGD": lambda named: DecoupledDecay(named).attach(
        torch.optim.SGD(named, momentum=0.9)
    ),
}


def network() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"}).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for t in range(first, last):
        set_gradients(model.parameters(), t)
        optimizer.step()


def one_group(named: Named) -> Any:
    return named


def two_groups(named: Named) -> Any:
    """Return a group of weights and one of biases, in the order in which they first appear."""
    kinds = dict.fromkeys(name.partition(".")[2] for name, _ in named)
    parts = [[item for item in named if item[0].endswith(kind)] for kind in kinds]
    return [{"params": part, "lr": 0.01 * part[0][1].ndim} for part in parts]


@pytest.mark.parametrize("groups", [one_group, two_groups])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_state_is_loaded_by_name(build: Build, groups: Callable[[Named], Any]) -> None:
    model = network()
    optimizer = build(groups(list(model.named_parameters())))
    train(model, optimizer, 0, 2)
    saved, other = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    before = copy.deepcopy(saved)
    resumed = build(groups(list(other.named_parameters())[::-1]))
    resumed.load_state_dict(saved)
    assert repr(saved) == repr(before)
    train(model, optimizer, 2, 4)
    train(other, resumed, 2, 4)
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_state_without_names_is_loaded_by_position(build: Build) -> None:
    """Up to version 0.2.0, or with torch before 2.6, the groups may have no names."""
    model = network()
    optimizer = build(list(model.named_parameters()))
    train(model, optimizer, 0, 2)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["param_names"]
    other = network()
    resumed = build(list(other.named_parameters()))
    resumed.load_state_dict(saved)
    for p, q in zip(model.parameters(), other.parameters()):
        for key, value in optimizer.state[p].items():
            if isinstance(value, Tensor):
                assert torch.equal(value, resumed.state[q][key])


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_state_of_other_groups_is_refused(build: Build) -> None:
    """Two groups of the same sizes, but with other parameters."""
    saved = build(two_groups(list(network().named_parameters()))).state_dict()
    named = list(network().named_parameters())
    other = build([{"params": named[:3]}, {"params": named[3:]}])
    with pytest.raises(ValueError, match=r"saved groups, got 'a\.bias' in place of 'b\.weight'"):
        other.load_state_dict(saved)
    assert not other.state


@pytest.mark.parametrize(("one", "other"), [(SGDCPR, AdamCPR), (AdamCPR, SGDCPR), (MuonCPR, SGDCPR)])
def test_state_of_another_optimizer_is_refused(one: Build, other: Build) -> None:
    model = network()
    optimizer, loaded = one(model), other(model)
    train(model, optimizer, 0, 2)
    before = copy.deepcopy(loaded.state_dict())
    with pytest.raises(ValueError, match=f"a state of {other.__name__}, got one of another optimizer"):
        loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state_dict()["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("kappa", ["ws1000", KappaIP(2)])
def test_every_entry_of_the_state_is_loaded_by_name(kappa: Any) -> None:
    """Entries differ from matrix to matrix, those that a step seldom reads too."""

    def build(names: list[str]) -> AdamCPR:
        return AdamCPR([(name, matrix(0.5)) for name in names], kappa=kappa, adaptive=True)

    names = ["a", "b", "c", "d"]
    state = build(names).state_dict()
    entries = {key: value for key, value in state["cpr"]["state"].items() if value.ndim}
    for value in entries.values():
        is_flag = value.dtype == torch.bool
        value.copy_(torch.tensor([True, False, False, True] if is_flag else [1.0, 2.0, 3.0, 4.0]))
    assert {"kappa", "lagrange_multiplier", "was_positive"} <= entries.keys()
    for order in (["d", "c", "b", "a"], ["b", "a", "c", "d"]):
        optimizer = build(order)
        optimizer.load_state_dict(state)
        loaded = optimizer.state_dict()["cpr"]["state"]
        for key, value in entries.items():
            expected = [value[names.index(name)].item() for name in order]
            assert loaded[key].tolist() == expected, key


def test_detached_method_keeps_the_order_of_its_optimizer() -> None:
    named = [(name, matrix(0.5)) for name in "ab"]
    cpr = CPR(named)
    cpr.attach(torch.optim.SGD([p for _, p in reversed(named)], lr=0.1))
    cpr.detach()
    assert cpr.state_dict()["order"] == ["b", "a"]
