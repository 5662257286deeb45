"""CPR attached to an optimizer: arguments, closures, and state dicts."""

from __future__ import annotations

import copy
import importlib
import math
import pickle

import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, KappaK
from nnunet_cpr.baselines import DecoupledDecay
from tests.helpers.matrices import (
    matrix,
    set_gradients,
    take_steps_by_closure,
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


def test_optimizer_without_the_parameters_is_refused(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    with pytest.raises(ValueError, match=r"does not have '2\.weight', '4\.weight'"):
        CPR(model).attach(optimizer)


def test_optimizer_with_its_own_decay_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match=r"weight decay to '0\.weight'.*weight_decay=0"):
        CPR(model).attach(torch.optim.AdamW(model.parameters()))
    # On parameters that CPR leaves alone it may decay.
    biases = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": biases, "weight_decay": 0.1}, {"params": matrices, "weight_decay": 0}]
    CPR(model).attach(torch.optim.AdamW(groups))


def test_a_tensor_is_a_weight_decay_too(model: torch.nn.Module) -> None:
    optimizer = CPR(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    set_gradients(model.parameters(), 0)
    group = optimizer.param_groups[0]
    with pytest.raises(ValueError, match="applies weight decay"):
        CPR(model).attach(torch.optim.AdamW(model.parameters(), weight_decay=torch.tensor(0.1)))
    for decay in (torch.tensor(0.1), torch.tensor(math.nan), torch.tensor(0.0, device="meta")):
        group["weight_decay"] = decay
        with pytest.raises(ValueError, match="applies weight decay"):
            optimizer.step()
    group["weight_decay"] = torch.tensor(0.0)
    optimizer.step()


def test_parameters_that_come_later_are_refused(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    optimizer.add_param_group({"params": [("late", matrix())]})
    with pytest.raises(ValueError, match=r"group 1: expected no group .*, got a new group; build"):
        optimizer.step()


@pytest.mark.parametrize("do", [copy.deepcopy, pickle.dumps])
def test_optimizers_with_attachment_refuse_to_be_copied(model: torch.nn.Module, do) -> None:
    torchs = torch.optim.SGD(model.parameters(), lr=0.1)
    for attached in (CPR(model), DecoupledDecay(model)):
        attached.attach(torchs)
        with pytest.raises(TypeError, match=f"{attached.title} attached cannot be copied"):
            do(torchs)
        attached.detach()
        do(torchs)
        do(attached)
    with pytest.raises(TypeError, match="cannot be copied"):
        do(SGDCPR(model, lr=0.1))


# Closures


def test_closure_is_evaluated_before_the_correction() -> None:
    """Check that the gradient is taken at theta_t, not at the corrected point."""

    def take_steps(kappa: float) -> list[tuple[torch.Tensor, torch.optim.Optimizer]]:
        return take_steps_by_closure(
            lambda p: SGDCPR([p], 0.1, momentum=0, nesterov=False, kappa=KappaK(kappa))
        )

    (without, _), *with_one = take_steps(2.3)
    assert not torch.equal(without, take_steps(100)[0][0]), "the bound has to matter"
    for p, optimizer in with_one:
        assert torch.equal(p, without)
        assert optimizer.cpr.step_count == 3


# State


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["config"].update(kappa="KappaWS(steps=7)"), r"kappa: .*got 'KappaWS\(steps=7\)'"),
        (lambda s: s["names"].__setitem__(0, "x"), r"it lacks '0\.weight' and it has 'x', which is not"),
        (
            lambda s: s["shapes"].__setitem__(0, [1, 2]),
            r"shape: expected .*, got \[1, 2\] for '0\.weight'",
        ),
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


def test_a_state_saved_without_cpr_is_refused(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match="saved without CPR"):
        optimizer.load_state_dict(state)


def test_distributed_checkpoint_saves_and_loads_without_counting_a_step(model: torch.nn.Module) -> None:
    module = importlib.import_module("torch.distributed.checkpoint.state_dict")
    get_state, set_state = module.get_optimizer_state_dict, module.set_optimizer_state_dict
    for momentum in (0.0, 0.9):
        optimizer = SGDCPR(model, lr=0.1, momentum=momentum, nesterov=False, kappa="ki0x1")
        initial = get_state(model, optimizer)
        assert optimizer.cpr.step_count == 0
        set_gradients(model.parameters(), 0)
        optimizer.step()
        saved = get_state(model, optimizer)
        set_state(model, optimizer, initial)
        assert optimizer.cpr.step_count == 0
        set_state(model, optimizer, saved)
        assert optimizer.cpr.step_count == 1 and optimizer.cpr.kappa.isfinite().all()
        assert "cpr" not in optimizer.param_groups[0]


def test_decay_of_asgd_is_refused() -> None:
    matrix = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(
        ValueError, match=r"applies weight decay to '0'.*build the optimizer with lambd=0"
    ):
        CPR([matrix]).attach(torch.optim.ASGD([matrix]))
    CPR([matrix]).attach(torch.optim.ASGD([matrix], lambd=0))
