"""CPR attached to an optimizer: arguments and state dicts."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR
from tests.helpers.matrices import (
    matrix,
    set_gradients,
)

# Attaching


def test_attaching_twice_is_refused(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cpr = CPR(model)
    cpr.attach(optimizer)
    with pytest.raises(RuntimeError, match="attached to an optimizer already"):
        cpr.attach(optimizer)
    with pytest.raises(RuntimeError, match="another CPR"):
        CPR(model).attach(optimizer)
    cpr.detach()
    CPR(model).attach(optimizer)


def test_optimizer_with_its_own_decay_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match=r"weight decay to '0\.weight'.*weight_decay=0"):
        CPR(model).attach(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"applies weight decay to '0\.weight'.*with lambd=0"):
        CPR(model).attach(torch.optim.ASGD(model.parameters()))


def test_parameters_that_come_later_are_refused(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    optimizer.add_param_group({"params": [("late", matrix())]})
    with pytest.raises(ValueError, match=r"group 1: expected no group .*, got a new group; build"):
        optimizer.step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_decay": 0.1}, r"applies weight decay to '0\.weight'.*with weight_decay=0"),
        (
            {"kappa": "ws5"},
            "group 0: expected .*'ws1000'.* as at construction, got .*'ws5'.*; build a new",
        ),
        ({"mu": 2.0}, "group 0: expected .* as at construction, got .*'mu': 2.0"),
    ],
)
def test_later_settings_are_refused(model: torch.nn.Module, change: dict, message: str) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("ours", [True, False])
def test_detached_cpr_does_nothing(model: torch.nn.Module, ours: bool) -> None:
    twin = copy.deepcopy(model)
    if ours:
        optimizer = SGDCPR(model, lr=0.1, kappa="k1en3")
        cpr = optimizer.cpr
    else:
        cpr = CPR(model, kappa="k1en3")
        optimizer = cpr.attach(torch.optim.SGD(model.parameters(), 0.1, 0.99, nesterov=True))
    cpr.detach()
    plain = torch.optim.SGD(twin.parameters(), 0.1, 0.99, nesterov=True)
    for t in range(3):
        set_gradients(model.parameters(), t)
        set_gradients(twin.parameters(), t)
        optimizer.step()
        plain.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-10, atol=1e-12)
    assert cpr.step_count == 0 and "cpr" not in optimizer.state_dict()


def test_closure_is_evaluated_before_one_correction(model: torch.nn.Module) -> None:
    cpr = CPR(model, kappa="ki0x0p9")
    optimizer = cpr.attach(torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4))
    measured = []

    def closure() -> torch.Tensor:
        measured.append((cpr.step_count, cpr.measure.clone()))
        set_gradients(model.parameters(), 0)
        return torch.ones(())

    first = cpr.measure
    optimizer.step(closure)
    assert len(measured) > 1 and cpr.step_count == 1
    assert measured[0][0] == 0 and torch.equal(measured[0][1], first)
    assert {count for count, _ in measured[1:]} == {1}


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_an_optimizer_of_a_meta_model_refuses_to_step(build: type) -> None:
    """``to_empty`` makes new parameters, so such an optimizer would train nothing."""
    model = torch.nn.Linear(4, 3, device="meta")
    optimizer = build(model)
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"'weight' is on the meta device, .* before building"):
        optimizer.step()
    assert optimizer.cpr.step_count == 0


@pytest.mark.parametrize("do", [copy.deepcopy, pickle.dumps])
def test_optimizers_with_attachment_refuse_to_be_copied(model: torch.nn.Module, do) -> None:
    for optimizer in (SGDCPR(model), CPR(model).attach(torch.optim.SGD(model.parameters()))):
        with pytest.raises(TypeError, match="CPR attached cannot be copied"):
            do(optimizer)


# State


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["config"].update(kappa="KappaWS(steps=7)"), r"kappa: .*got 'KappaWS\(steps=7\)'"),
        (lambda s: s["names"].__setitem__(0, "x"), r"it lacks '0\.weight' and it has 'x', which is not"),
        (lambda s: s["shapes"].__setitem__(0, [1, 2]), r"shape: .*, got \[1, 2\] for '0\.weight'"),
        (lambda s: s["shapes"].pop(), r"it is damaged \('IndexError: list index out of range'\)"),
        (lambda s: s["state"].pop("kappa"), "it is damaged .*kappa"),
        (lambda s: s["state"].update(kappa=torch.ones(9)), r"kappa: expected .* \[3\], got .* \[9\]"),
        (lambda s: s["state"].update(kappa=s["state"]["kappa"].half()), "kappa: .* got torch.float16"),
    ],
)
def test_mismatched_state_is_refused_without_changes(
    model: torch.nn.Module, change, message: str
) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    change(state["cpr"])
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=f"cannot load the CPR state: .*{message}"):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["cpr"]["config"] == before["cpr"]["config"]
    assert torch.equal(after["cpr"]["state"]["step"], before["cpr"]["state"]["step"])


def test_state_that_torch_refuses_leaves_cpr_unchanged(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model)
    state = optimizer.state_dict()
    state["cpr"]["state"]["step"] += 5
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(state)
    assert optimizer.cpr.step_count == 0


def test_state_in_another_order_is_refused_without_names() -> None:
    """CPR's state goes by name, torch's by order, if its parameters have no names."""

    def start(names: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, CPR]:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})
        cpr = CPR(model)
        return model, cpr.attach(torch.optim.Adam(model.parameters())), cpr

    model, optimizer, cpr = start("ab")
    _, other, other_cpr = start("ba")
    other.load_state_dict(optimizer.state_dict())  # there are no momenta yet
    set_gradients(model.parameters(), 0)
    optimizer.step()
    with pytest.raises(ValueError, match=r"saved order, .*, got 'b\.weight' in place of 'a\.weight'"):
        other.load_state_dict(optimizer.state_dict())
    assert other_cpr.step_count == 0 and not other.state
    other_cpr.load_state_dict(cpr.state_dict())
    assert other_cpr.step_count == 1


def test_order_of_the_optimizer_decides_without_names() -> None:
    """Torch matches momenta by the optimizer's order; that in which CPR was built changes nothing."""

    def start(cpr_order: str, optimizer_order: str) -> tuple[dict[str, torch.nn.Parameter], Any]:
        params = {name: torch.nn.Parameter(torch.randn(3, 3)) for name in "ab"}
        optimizer = torch.optim.SGD([params[name] for name in optimizer_order], lr=0.1, momentum=0.9)
        return params, CPR([(name, params[name]) for name in cpr_order]).attach(optimizer)

    for cpr_order, optimizer_order in (("ab", "ab"), ("ba", "ab"), ("ab", "ba")):
        params, optimizer = start(cpr_order, optimizer_order)
        for name, value in (("a", 1.0), ("b", -2.0)):
            params[name].grad = torch.full_like(params[name], value)
        optimizer.step()
        for other_cpr, other_order in (("ab", "ab"), ("ba", "ab"), ("ab", "ba"), ("ba", "ba")):
            other_params, other = start(other_cpr, other_order)
            if other_order != optimizer_order:
                with pytest.raises(ValueError, match="expected the parameters in the saved order"):
                    other.load_state_dict(optimizer.state_dict())
                continue
            other.load_state_dict(optimizer.state_dict())
            for name, value in (("a", 1.0), ("b", -2.0)):
                assert other.state[other_params[name]]["momentum_buffer"].unique().tolist() == [value]


def test_decay_as_tensor_that_is_changed_in_place_is_refused(model: torch.nn.Module) -> None:
    decay = torch.tensor(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    optimizer.param_groups[0]["weight_decay"] = decay
    CPR(model).attach(optimizer)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    decay.fill_(0.5)
    with pytest.raises(ValueError, match="applies weight decay to"):
        optimizer.step()


def test_a_state_saved_without_cpr_is_refused(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match="saved without CPR"):
        optimizer.load_state_dict(state)


def test_a_flattened_state_is_refused_for_what_torch_drops(model: torch.nn.Module) -> None:
    # Imported, as a user does, though earlier tests may have done so.
    checkpoint = importlib.import_module("torch.distributed.checkpoint.state_dict")
    optimizer, options = AdamCPR(model, lr=0.1), checkpoint.StateDictOptions
    set_gradients(model.parameters(), 0)
    optimizer.step()
    flat = options(flatten_optimizer_state_dict=True)
    state = checkpoint.get_optimizer_state_dict(model, optimizer, options=flat)
    with pytest.raises(ValueError, match="or with flatten_optimizer_state_dict=True, for which torch"):
        checkpoint.set_optimizer_state_dict(model, optimizer, state, options=flat)


def test_torchs_optimizer_ignores_the_state_of_cpr(model: torch.nn.Module) -> None:
    ours = AdamCPR(model, lr=0.1)
    set_gradients(model.parameters(), 0)
    ours.step()
    stock = torch.optim.Adam(model.parameters(), lr=0.1)
    stock.load_state_dict(ours.state_dict())
    for p in model.parameters():
        assert torch.equal(stock.state[p]["exp_avg"], ours.state[p]["exp_avg"])
