"""Comparison methods on an optimizer: attaching, detaching, and checkpoints."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nnunet_cpr import CPR, SGDCPR
from nnunet_cpr.baselines import (
    AdaDecay,
    CorrectedDecay,
    CosineDecay,
    DecoupledDecay,
    Hyperball,
    WeightNormControl,
)
from nnunet_cpr.baselines.registry import BASELINES
from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.helpers.baseline_kinds import KINDS, every_baseline, same_states
from tests.helpers.examples import examples
from tests.helpers.matrices import set_gradients

STEPS = 12


def trained(model: torch.nn.Module, kind: str, steps: int = 3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    baseline = KINDS[kind](model)
    baseline.attach(optimizer)
    for t in range(steps):
        set_gradients(model.parameters(), t)
        optimizer.step()
    return baseline, optimizer


# Attaching


@every_baseline
def test_only_matrices_are_touched(kind: str, model: torch.nn.Module) -> None:
    baseline, optimizer = trained(model, kind, steps=0)
    assert baseline.names == ["0.weight", "2.weight", "4.weight"]
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        p.grad[0] = 1.0  # AWD and hyperball follow the gradients
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.step()
    for name, p in model.named_parameters():
        unmoved = before[name] - 0.1 * p.grad
        assert torch.equal(p, unmoved) == (name not in baseline.names), name


@every_baseline
def test_attaching_to_what_has_one_already_is_refused(kind: str, model: torch.nn.Module) -> None:
    baseline, optimizer = trained(model, kind)
    with pytest.raises(
        RuntimeError, match=f"^{baseline.title} is attached to an optimizer already.*detach"
    ):
        baseline.attach(optimizer)
    for other in (CPR(model), *(build(model) for build in KINDS.values())):
        with pytest.raises(RuntimeError, match=f"another {baseline.title} attached.*detach"):
            other.attach(optimizer)
    with pytest.raises(RuntimeError, match="another CPR attached"):
        KINDS[kind](model).attach(SGDCPR(model, lr=0.1))
    baseline.detach()
    CPR(model).attach(optimizer)


@every_baseline
def test_an_optimizers_own_decay_is_refused(kind: str, model: torch.nn.Module) -> None:
    baseline = KINDS[kind](model)
    with pytest.raises(ValueError, match=rf"to '0\.weight'.*{baseline.title} regular.*weight_decay=0"):
        baseline.attach(torch.optim.AdamW(model.parameters()))
    optimizer = baseline.attach(torch.optim.Adam(model.parameters()))
    set_gradients(model.parameters(), 0)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="applies weight decay"):
        optimizer.step()
    assert baseline.step_count == 0 and torch.equal(model[0].weight, before)


@every_baseline
def test_an_optimizer_without_the_parameters_is_refused(kind: str, model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match=r"does not have '2\.weight', '4\.weight'"):
        KINDS[kind](model).attach(torch.optim.SGD([model[0].weight], lr=0.1))


@every_baseline
def test_a_detached_baseline_does_nothing(kind: str, model: torch.nn.Module) -> None:
    baseline, optimizer = trained(model, kind)
    baseline.detach()
    before, found = copy.deepcopy(model.state_dict()), baseline.state_dict()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0].update(momentum=0.0, weight_decay=0.0)
    optimizer.step()
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert "baseline" not in optimizer.state_dict()
    assert same_states(baseline.state_dict(), found)


# State


MOMENTUM: dict[type, dict] = {
    torch.optim.SGD: {"momentum": 0.9},
    FusedSGD: {"momentum": 0.9},
    torch.optim.Adam: {},
    FusedAdam: {},
}


@every_baseline
@examples(4, search=30)
@given(stop=st.integers(0, STEPS - 1), cls=st.sampled_from(list(MOMENTUM)), lr_steps=st.integers(1, 5))
@example(stop=5, cls=FusedSGD, lr_steps=2)
def test_a_resumed_run_is_bit_identical(kind: str, stop: int, cls: type, lr_steps: int) -> None:
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
        optimizer = cls(groups, lr=0.01, **MOMENTUM[cls])
        baseline = KINDS[kind](model)
        baseline.attach(optimizer)
        return model, baseline, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, lr_steps, 0.5)

    def run(model, optimizer, scheduler, steps) -> None:
        for t in steps:
            set_gradients(model.parameters(), t)
            if t % 4 == 1:
                model[0].weight.grad = None
            optimizer.step()
            scheduler.step()

    model, baseline, optimizer, scheduler = build()
    run(model, optimizer, scheduler, range(stop))
    saved = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, saved)
    run(model, optimizer, scheduler, range(stop, STEPS))

    resumed, other, other_optimizer, other_scheduler = build()
    with torch.no_grad():
        for p in resumed.parameters():
            p.mul_(3)  # a fresh model has other weights
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    other_optimizer.load_state_dict(checkpoint["optimizer"])
    other_scheduler.load_state_dict(checkpoint["scheduler"])
    assert other.step_count == stop
    run(resumed, other_optimizer, other_scheduler, range(stop, STEPS))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))
    assert same_states(baseline.state_dict(), other.state_dict())


@every_baseline
def test_saved_state_does_not_change_with_training(kind: str, model) -> None:
    _, optimizer = trained(model, kind)
    state = optimizer.state_dict()["baseline"]
    before = copy.deepcopy(state)
    set_gradients(model.parameters(), 9)
    optimizer.step()
    assert same_states(state, before) and state["state"]["step"] == 3


@every_baseline
def test_state_goes_by_name_not_by_order(kind: str, model: torch.nn.Module) -> None:
    baseline, _ = trained(model, kind)
    turned = KINDS[kind](reversed(list(model.named_parameters())))
    assert turned.names == baseline.names[::-1]
    turned.load_state_dict(baseline.state_dict())
    assert turned.step_count == 3
    set_gradients(model.parameters(), 9)
    twin = copy.deepcopy(model)
    again = KINDS[kind](twin)
    again.load_state_dict(turned.state_dict())
    for net, one in ((model, turned), (twin, again)):
        set_gradients(net.parameters(), 9)
        one.attach(torch.optim.SGD(net.parameters(), lr=0.1)).step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["config"].update({list(s["config"])[1]: 7.5}), r"\w+: expected [\d.]+, got 7\.5"),
        (lambda s: s["config"].update(method="Mine"), "method: expected .*, got 'Mine'"),
        (lambda s: s["names"].__setitem__(0, "x"), r"it lacks '0\.weight' and it has 'x', which is not"),
        (lambda s: s["shapes"].__setitem__(0, [1, 2]), r"shape: .*, got \[1, 2\] for '0\.weight'"),
        (lambda s: s.update(version=0), "expected version 1, got 0"),
    ],
    ids=["config", "method", "names", "shapes", "version"],
)
@every_baseline
def test_mismatched_state_is_refused_without_changes(kind: str, model, change, message: str) -> None:
    baseline, optimizer = trained(model, kind)
    before = baseline.state_dict()
    momentum = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    state = copy.deepcopy(optimizer.state_dict())
    change(state["baseline"])
    for buffers in state["state"].values():
        buffers["momentum_buffer"] += 1
    with pytest.raises(
        ValueError, match=f"^cannot load the {baseline.title} state: .*{message}"
    ) as error:
        optimizer.load_state_dict(state)
    assert "\n" not in str(error.value)
    assert same_states(baseline.state_dict(), before)
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], momentum)


@every_baseline
def test_a_state_of_another_kind_is_refused(kind: str, model: torch.nn.Module) -> None:
    """The methods share a key in the state dict, and some share settings."""
    state = trained(model, kind)[1].state_dict()
    for other in KINDS:
        if other != kind:
            with pytest.raises(ValueError, match="method: expected"):
                trained(model, other)[1].load_state_dict(state)
    with pytest.raises(ValueError, match="saved without CPR"):
        SGDCPR(model, lr=0.1).load_state_dict(state)


@every_baseline
def test_a_state_without_a_baseline_is_refused(kind: str, model: torch.nn.Module) -> None:
    baseline, optimizer = trained(model, kind)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for state in (plain.state_dict(), SGDCPR(model, lr=0.1).state_dict()):
        with pytest.raises(ValueError, match=f"saved without {baseline.title}"):
            optimizer.load_state_dict(state)
    assert baseline.step_count == 3
    plain.load_state_dict(optimizer.state_dict())  # the other way round is torch's business


# Settings


@pytest.mark.parametrize(
    ("setting", "build"),
    [
        ("weight_decay", lambda m: DecoupledDecay(m, -1.0)),
        ("weight_decay", lambda m: DecoupledDecay(m, None)),
        ("max_lr", lambda m: CorrectedDecay(m, max_lr="1")),
        ("alpha", lambda m: AdaDecay(m, alpha=float("nan"))),
        ("steps", lambda m: CosineDecay(m, steps=0.5)),
        ("factor", lambda m: Hyperball(m, 0)),
        ("start", lambda m: WeightNormControl(m, start=-1)),
    ],
)
def test_wrong_settings_are_refused(model: torch.nn.Module, setting: str, build) -> None:
    with pytest.raises(ValueError, match=f"^{setting}: expected a .* number.*, got"):
        build(model)


@every_baseline
def test_repr_shows_the_settings(kind: str, model: torch.nn.Module) -> None:
    baseline = KINDS[kind](model)
    assert repr(baseline).startswith(f"{type(baseline).__name__}(3 matrices, ")
    with pytest.warns(UserWarning, match="no parameter to regularize"):
        KINDS[kind]([torch.nn.Parameter(torch.ones(3))])


def test_registry_builds_by_keyword(model: torch.nn.Module) -> None:
    """Build comparison methods as trainer names and vision runs do."""
    built = {
        keyword: entry.build(model, weight_decay=0.25, steps=40, value=7 if entry.is_count else 2.5)
        for keyword, entry in BASELINES.items()
    }
    settings = {keyword: baseline.state_dict()["config"] for keyword, baseline in built.items()}
    assert settings == {
        "decoupled": {"method": "DecoupledDecay", "weight_decay": 0.25},
        "adadecay": {"method": "AdaDecay", "weight_decay": 0.25, "alpha": 2.5},
        "awd": {"method": "AdaptiveWeightDecay", "weight_decay": 0.25},
        "cosine": {"method": "CosineDecay", "weight_decay": 0.25, "final": 2.5, "steps": 40},
        "rescale": {"method": "NormRescaling", "factor": 2.5},
        "corrected": {
            "method": "CorrectedDecay",
            "normalized": [True, False, False],
            "max_lr": None,
            "weight_decay": 0.25,
        },
        "cautious": {"method": "CautiousDecay", "weight_decay": 0.25},
        "independent": {"method": "IndependentDecay", "max_lr": None, "weight_decay": 0.25},
        "norm": {"method": "WeightNormControl", "weight_decay": 0.25, "start": 0, "factor": 2.5},
        "normws": {"method": "WeightNormControl", "weight_decay": 0.25, "start": 7, "factor": 1.0},
        "hyperball": {"method": "Hyperball", "factor": 1.0},
    }
