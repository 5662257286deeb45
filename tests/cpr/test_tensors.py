"""Models, gradients and states that are cast, moved or resized apart: refused before anything moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn

from nnunet_cpr import CPR, SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.baselines import DecoupledDecay, WeightNormControl
from nnunet_cpr.optimizers import Muon
from tests.helpers.resume_cases import differences

pytestmark = pytest.mark.filterwarnings("ignore:params. no parameter to orthogonalize")


def attached(build: Callable[..., Any], method: Callable[..., Any] = CPR, **options: Any) -> Any:
    """Return a function that builds an optimizer with a method attached."""

    def built(model: nn.Module) -> Any:
        return method(model).attach(build(model.parameters(), lr=0.1, **options))

    return built


def cpr(model: nn.Module) -> CPR:
    return CPR(model, kappa="k0p01")


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGDCPR": lambda m: SGDCPR(m, lr=0.1, kappa="k0p01"),
    "SGDCPR, unfused": lambda m: SGDCPR(m, lr=0.1, kappa="k0p01", fused=False),
    "AdamCPR": lambda m: AdamCPR(m, lr=0.1, kappa="k0p01"),
    "AdamCPR, l1": lambda m: AdamCPR(m, lr=0.1, kappa="k0p01", regularizer="l1"),
    "AdamCPR, unfused": lambda m: AdamCPR(m, lr=0.1, kappa="k0p01", fused=False),
    "MuonCPR": lambda m: MuonCPR(m, lr=0.1, kappa="k0p01"),
    "Muon": lambda m: Muon(m, lr=0.1),
    "SGD": attached(torch.optim.SGD, cpr, momentum=0.9),
    "Adam": attached(torch.optim.Adam, cpr),
    "Adam, fused": attached(torch.optim.Adam, cpr, fused=True),
    "NAdam": attached(torch.optim.NAdam, cpr),
    "Lion": attached(timm.optim.Lion, cpr, weight_decay=0),
    "Adam, decay": attached(torch.optim.Adam, lambda m: DecoupledDecay(m, 0.1)),
    "SGD, norm": attached(torch.optim.SGD, lambda m: WeightNormControl(m, 0.1), momentum=0.9),
}


def set_gradients(model: nn.Module, t: int) -> None:
    generator = torch.Generator().manual_seed(t)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def cast_one(model: Any) -> None:
    model[0].double()


def resize_one(model: Any) -> None:
    p = model[2].weight
    p.data = p.data[:1].clone()
    p.grad = p.grad[:1].clone()


def resize_gradient(model: Any) -> None:
    model[2].weight.grad.data = model[2].weight.grad[:1].clone()


def cast_gradient(model: Any) -> None:
    model[2].bias.grad.data = model[2].bias.grad.double()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    **{f.__name__: f for f in (cast_one, resize_one, resize_gradient, cast_gradient)},
}


def snapshot(model: nn.Module, optimizer: Any) -> list[Any]:
    state = optimizer.state_dict()
    of_method = state.get("cpr", state.get("baseline"))
    return copy.deepcopy([list(model.parameters()), state["state"], of_method])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_changed_tensors_are_refused_before_anything_moves(kind: str, change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    optimizer = OPTIMIZERS[kind](model)
    for t in range(3):
        set_gradients(model, t)
        optimizer.step()
    set_gradients(model, 3)
    CHANGES[change](model)
    before = snapshot(model, optimizer)
    for _ in range(2):  # a caller may catch the error and repeat
        with pytest.raises(RuntimeError, match=r"parameter .*: expected .* like the parameter, got"):
            optimizer.step()
        assert differences(before, snapshot(model, optimizer)) == []


@pytest.mark.parametrize("change", [lambda t: t[:1].clone(), torch.Tensor.double])
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "Lion"])
def test_changed_state_is_refused_before_anything_moves(kind: str, change: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    optimizer = OPTIMIZERS[kind](model)
    for t in range(3):
        set_gradients(model, t)
        optimizer.step()
    state = optimizer.state[model[2].weight]
    key = next(key for key, t in state.items() if t.ndim)
    state[key] = change(state[key])
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=f"{key} of parameter .*: expected"):
        optimizer.step()
    assert differences(before, snapshot(model, optimizer)) == []


@pytest.mark.parametrize("kind", ["AdamCPR", "Adam", "MuonCPR", "NAdam"])
def test_sparse_gradients_are_refused_before_anything_moves(kind: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = OPTIMIZERS[kind](model)
    model(torch.tensor([1, 2])).sum().backward()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert differences(before, snapshot(model, optimizer)) == []


@pytest.mark.parametrize("kind", ["SGDCPR", "Adam", "Lion"])
def test_state_that_was_cast_with_the_model_is_stepped(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    optimizer = OPTIMIZERS[kind](model)
    set_gradients(model, 0)
    optimizer.step()
    model.double()
    for state in optimizer.state.values():
        state.update({key: t.double() for key, t in state.items() if t.ndim})
    set_gradients(model, 1)
    optimizer.step()
    assert model[0].weight.dtype is torch.float64
