"""CPR attached to an optimizer: arguments, closures, and state dicts."""

from __future__ import annotations

import copy
import importlib
import io
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.baselines import DecoupledDecay
from nnunet_cpr.bounds import Bound
from tests.helpers.examples import examples
from tests.helpers.matrices import (
    calls_of_its_closure,
    matrix,
    set_gradients,
    take_same_steps,
    take_steps_by_closure,
)

# Attaching


def test_hook_on_a_plain_optimizer_equals_the_subclass(model: torch.nn.Module) -> None:
    twin = copy.deepcopy(model)
    ours = AdamCPR(model, lr=1e-2, kappa=KappaWS(3))
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0, fused=True)
    assert CPR(twin, kappa=KappaWS(3)).attach(plain) is plain
    take_same_steps(20, (model, ours), (twin, plain), rtol=1e-12, atol=1e-14)
    assert ours.cpr.lagrange_multiplier.max() > 0


def test_subclasses_are_torchs_own() -> None:
    assert issubclass(SGDCPR, torch.optim.SGD) and issubclass(AdamCPR, torch.optim.Adam)


def test_works_with_torchs_schedulers(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] < 0.1


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


def test_weight_decay_that_comes_later_is_refused(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    set_gradients(model.parameters(), 0)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match="applies weight decay"):
        optimizer.step()
    assert optimizer.cpr.step_count == 0


def test_parameters_that_come_later_are_refused(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    optimizer.add_param_group({"params": [("late", matrix())]})
    with pytest.raises(ValueError, match=r"group 1: expected no group .*, got a new group; build"):
        optimizer.step()


def test_frozen_parameters_stay_in_the_optimizer(model: torch.nn.Module) -> None:
    model[0].requires_grad_(False)
    optimizer = SGDCPR(model, lr=0.1)
    assert optimizer.cpr.names == ["2.weight", "4.weight"]
    model[0].requires_grad_(True)
    before = model[0].weight.clone()
    set_gradients(model.parameters(), 0)
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("wrong", [None, torch.nn.Linear(1, 1)])
def test_attaching_to_another_object_changes_nothing(model: torch.nn.Module, wrong) -> None:
    cpr = CPR(model)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer that runs hooks, got a"):
        cpr.attach(wrong)
    cpr.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_sparse_gradients_of_embeddings_work() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=True), torch.nn.Linear(3, 2))
    optimizer = SGDCPR(model, lr=0.1, momentum=0, nesterov=False)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


def test_detached_cpr_does_nothing(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.0, momentum=0, nesterov=False, kappa=KappaK(1e-9))
    optimizer.cpr.detach()
    before = model[0].weight.clone()
    set_gradients(model.parameters(), 0)
    optimizer.step()
    assert torch.equal(model[0].weight, before) and "cpr" not in optimizer.state_dict()


@pytest.mark.parametrize("do", [copy.copy, copy.deepcopy, pickle.dumps])
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


def test_a_model_beside_an_optimizer_can_be_copied(model: torch.nn.Module) -> None:
    optimizer = CPR(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    set_gradients(model.parameters(), 0)
    optimizer.step()
    twin = copy.deepcopy(model)
    other = CPR(twin).attach(torch.optim.SGD(twin.parameters(), lr=0.1))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state_dict()["cpr"]["state"]["step"] == 1


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


def test_repeated_closure_calls_correct_once_a_step() -> None:
    p = matrix(2.0)
    optimizer = torch.optim.LBFGS([p], lr=1e-3, max_iter=5)
    cpr = CPR([p], kappa=KappaK(3.9))
    cpr.attach(optimizer)
    assert calls_of_its_closure(optimizer, p) > 1 and cpr.step_count == 1


# State

BOUND = st.one_of(
    st.builds(KappaK, st.floats(1e-4, 1.0)),
    st.builds(KappaKI0, st.floats(0.5, 1.5)),
    st.builds(KappaWS, st.integers(1, 12)),
    st.builds(KappaIP, st.integers(1, 4), st.sampled_from([0.0, 0.5])),
)


@examples(20, search=200)
@given(
    bound=BOUND,
    regularizer=st.sampled_from(["l2", "l1", "std", "huber"]),
    adaptive=st.booleans(),
    adam=st.booleans(),
    stop=st.integers(0, 15),
)
def test_a_resumed_run_is_bit_identical(
    bound: Bound, regularizer: str, adaptive: bool, adam: bool, stop: int
) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        cls = AdamCPR if adam else SGDCPR
        settings = {"kappa": bound, "regularizer": regularizer, "mu": 0.1, "adaptive": adaptive}
        return model, cls(model, lr=0.01, **settings)

    model, optimizer = build()
    saved = io.BytesIO()
    for t in range(16):
        if t == stop:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        set_gradients(model.parameters(), t)
        optimizer.step()

    resumed, other = build()
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    for t in range(stop, 16):
        set_gradients(resumed.parameters(), t)
        other.step()
    for p, q in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(p, q)
    mine, theirs = optimizer.cpr.state_dict(), other.cpr.state_dict()
    for key, value in mine["state"].items():
        assert torch.equal(value.nan_to_num(-1.0), theirs["state"][key].nan_to_num(-1.0)), key


def test_state_goes_by_name_not_by_order(model: torch.nn.Module) -> None:
    named = list(model.named_parameters())
    optimizer = SGDCPR(named, lr=0.1, kappa=KappaWS(1))
    for t in range(3):
        set_gradients(model.parameters(), t)
        optimizer.step()
    turned = CPR(reversed(named), kappa=KappaWS(1))
    turned.load_state_dict(optimizer.cpr.state_dict())
    assert turned.names == optimizer.cpr.names[::-1]
    assert torch.equal(turned.kappa, optimizer.cpr.kappa.flip(0))


def test_compiled_model_has_unwrapped_names(model: torch.nn.Module) -> None:
    assert CPR(torch.compile(model)).names == CPR(model).names
    assert CPR(torch.compile(model).named_parameters()).names == CPR(model).names
    parts = torch.nn.Sequential(torch.compile(model[0]), *model[1:])
    assert CPR(parts).names == CPR(model).names
    assert CPR(torch.nn.DataParallel(model)).names == CPR(model).names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["config"].update(kappa="KappaWS(steps=7)"), r"kappa: .*got 'KappaWS\(steps=7\)'"),
        (lambda s: s["config"].update(regularizer="l1"), "regularizer: expected 'l2', got 'l1'"),
        (lambda s: s["config"].update(mu=2.0), "mu: expected 1.0, got 2.0"),
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


def test_state_refused_by_torch_leaves_cpr_unchanged(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    state = optimizer.state_dict()
    state["cpr"]["state"]["step"] += 5
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(state)
    assert optimizer.cpr.step_count == 0


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


def test_first_step_of_a_warmup_from_0_counts(model: torch.nn.Module) -> None:
    importlib.import_module("torch.distributed.checkpoint.state_dict")
    optimizer = SGDCPR(model, lr=0.0)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    assert optimizer.cpr.step_count == 1


def test_a_stock_optimizer_ignores_the_extra_entry(model: torch.nn.Module) -> None:
    ours = AdamCPR(model, lr=0.1)
    set_gradients(model.parameters(), 0)
    ours.step()
    stock = torch.optim.Adam(model.parameters(), lr=0.1)
    stock.load_state_dict(ours.state_dict())
    for p in model.parameters():
        assert torch.equal(stock.state[p]["exp_avg"], ours.state[p]["exp_avg"])


def test_decay_of_asgd_is_refused() -> None:
    matrix = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(
        ValueError, match=r"applies weight decay to '0'.*build the optimizer with lambd=0"
    ):
        CPR([matrix]).attach(torch.optim.ASGD([matrix]))
    CPR([matrix]).attach(torch.optim.ASGD([matrix], lambd=0))
