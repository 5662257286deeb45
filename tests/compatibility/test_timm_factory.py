"""Checks of timm's optimizer factory on ``adamcpr``, ``sgdcpr`` and their Lookahead variants."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.optim import (
    create_optimizer_v2,
    get_optimizer_class,
    get_optimizer_info,
    list_optimizers,
)
from timm.scheduler import (
    CosineLRScheduler,
    MultiStepLRScheduler,
    PlateauLRScheduler,
    PolyLRScheduler,
    StepLRScheduler,
    TanhLRScheduler,
    create_scheduler_v2,
)
from torch import nn

import nnunet_cpr.integrations.timm  # noqa: F401 (registers the optimizers)
from nnunet_cpr import SGDCPR, AdamCPR, MuonCPR
from tests.helpers.small_problems import (
    assert_all_equal,
    assert_equal,
    backward,
    linear_problem,
    matrix_with_gradient,
    minimize,
    small_model,
)

CLASSES = {"adamcpr": AdamCPR, "muoncpr": MuonCPR, "sgdcpr": SGDCPR}
NAMES = [*CLASSES, *(f"lookahead_{name}" for name in CLASSES)]

each_name = pytest.mark.parametrize("name", NAMES)
each_base_name = pytest.mark.parametrize("name", list(CLASSES))

Params = list[nn.Parameter]

# How a weight and a bias reach the factory, and its other arguments.
FACTORY_CALLS: dict[str, tuple[Callable[[Params], Any], dict[str, Any]]] = {
    "parameters": (lambda params: params, {"lr": 1e-3}),
    "default learning rate": (lambda params: params, {}),
    "one parameter": (lambda params: params[:1], {"lr": 1e-3}),
    "groups": (
        lambda params: [{"params": [params[0]]}, {"params": [params[1]], "lr": 3e-3}],
        {"lr": 1e-3},
    ),
    "weight group": (lambda params: [{"params": params[0], "lr": 3e-3}], {"lr": 1e-3}),
    "weight group, default learning rate": (lambda params: [{"params": params[0], "lr": 3e-3}], {}),
    "bias group": (lambda params: [{"params": params[1], "lr": 3e-3}], {"lr": 1e-3}),
    "momentum of 1": (lambda params: params, {"lr": 1e-3, "momentum": 1}),
    "weight decay": (lambda params: params, {"lr": 1e-3, "momentum": 1, "weight_decay": 0.1}),
    "weight decay of 1": (lambda params: params, {"lr": 1e-3, "weight_decay": 1}),
    "bound": (lambda params: params, {"lr": 1e-3, "kappa": "ki0x0p9", "mu": 0.1}),
}

each_call = pytest.mark.parametrize("call", list(FACTORY_CALLS))
each_layout = pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])


def create(name: str, call: str, params: Params) -> Any:
    arrange, options = FACTORY_CALLS[call]
    if "muon" in name and options.get("momentum") == 1:
        options = {**options, "momentum": 0.5}  # of a running average, so timm's Muon refuses 1, too
    if call != "bias group":
        return create_optimizer_v2(arrange(params), name, **options)
    with pytest.warns(UserWarning, match="no parameter to regularize"):
        return create_optimizer_v2(arrange(params), name, **options)


def base(optimizer: Any) -> Any:
    return getattr(optimizer, "_base_optimizer", optimizer)


def vit() -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **size, num_classes=3)


def train_vit(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    images, losses = torch.randn(4, 3, 16, 16, generator=generator), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 0]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# The registry


def test_factory_lists_the_optimizers() -> None:
    assert set(CLASSES) <= set(list_optimizers())
    assert set(CLASSES) == set(list_optimizers("*cpr"))
    described = dict(list_optimizers("*cpr", with_description=True))
    assert all(described[name] for name in CLASSES)


@each_base_name
def test_info_describes_the_optimizer(name: str) -> None:
    info = get_optimizer_info(name)
    assert info.name == name
    expected = {"adamcpr": (1, 1, 0), "muoncpr": (1, 1, 1), "sgdcpr": (0, 0, 1)}[name]
    assert (info.has_betas, info.has_eps, info.has_momentum) == expected


@each_base_name
def test_class_is_a_torch_optimizer(name: str) -> None:
    optimizer_class = get_optimizer_class(name, bind_defaults=False)
    assert isinstance(optimizer_class, type)
    assert issubclass(optimizer_class, torch.optim.Optimizer)
    assert issubclass(optimizer_class, CLASSES[name])
    bound = get_optimizer_class(name)
    assert getattr(bound, "func", bound) is optimizer_class


@each_base_name
def test_class_builds_an_optimizer(name: str) -> None:
    for optimizer_class in (get_optimizer_class(name), get_optimizer_class(name, bind_defaults=False)):
        p = matrix_with_gradient()
        before = p.detach().clone()
        optimizer = optimizer_class([p], lr=0.1)
        assert isinstance(optimizer, CLASSES[name])
        optimizer.step()
        assert not torch.equal(p, before)


@each_name
def test_created_optimizer_has_the_registered_class(name: str) -> None:
    optimizer = create_optimizer_v2(small_model(), name, lr=1e-3)
    registered = get_optimizer_class(name.split("_")[-1], bind_defaults=False)
    assert type(base(optimizer)) is registered
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert repr(base(optimizer)).startswith(registered.__name__)


# Parameters and groups


@each_layout
@each_call
@each_name
def test_created_optimizer_minimizes(name: str, call: str, contiguous: bool) -> None:
    params, closure = linear_problem(contiguous)
    optimizer = create(name, call, params)
    repr(base(optimizer))
    assert minimize(optimizer, closure) < 0


@each_call
@each_name
def test_loaded_copy_of_state_continues_identically(name: str, call: str) -> None:
    (params, closure), (others, other_closure) = linear_problem(), linear_problem()
    optimizer = create(name, call, params)
    for _ in range(8):
        optimizer.step(closure)
    with torch.no_grad():
        for p, other in zip(params, others):
            other.copy_(p)
    loaded = create(name, call, others)
    state, expected = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))
    loaded.load_state_dict(state)
    assert_equal(state, expected)
    for _ in range(8):
        optimizer.step(closure)
        loaded.step(other_closure)
        assert_all_equal(params, others)
    assert_equal(loaded.state_dict(), optimizer.state_dict())


@each_name
def test_group_learning_rates_are_kept(name: str) -> None:
    params, _ = linear_problem()
    optimizer = create(name, "groups", params)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 3e-3]
    assert optimizer.param_groups is base(optimizer).param_groups


@each_name
def test_weight_decay_only_selects(name: str) -> None:
    runs = []
    for weight_decay in (0.0, 0.1):
        params, closure = linear_problem()
        optimizer = create_optimizer_v2(params, name, lr=1e-3, weight_decay=weight_decay)
        minimize(optimizer, closure)
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0}
        runs.append(params)
    assert_all_equal(*runs)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("layer_decay", [None, 0.7])
@each_name
def test_model_trains_with_every_grouping(
    name: str, layer_decay: float | None, weight_decay: float
) -> None:
    model = vit()
    optimizer = create_optimizer_v2(
        model, name, lr=1e-3, weight_decay=weight_decay, layer_decay=layer_decay
    )
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    losses = train_vit(model, optimizer, steps=6)
    assert losses[-1] < losses[0]
    regularized = set(base(optimizer).cpr.names)
    assert "blocks.0.attn.qkv.weight" in regularized
    assert not regularized & {"pos_embed", "cls_token", "norm.weight", "head.bias"}


@each_base_name  # Lookahead moves back on purpose
def test_model_loss_falls_in_every_step(name: str) -> None:
    model = small_model()
    optimizer = create_optimizer_v2(model, name, lr=5e-2 if "adam" in name else 1e-2)
    losses = []
    for _ in range(20):
        losses.append(backward(model).item())
        optimizer.step()
    assert losses == sorted(losses, reverse=True)


@each_name
def test_rosenbrock_function_is_minimized(name: str) -> None:
    p = nn.Parameter(torch.tensor([1.5, 1.5]))
    with pytest.warns(UserWarning, match="no parameter to regularize"):
        optimizer = create_optimizer_v2([p], name, lr=1e-5 if "sgd" in name else 5e-2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        x, y = p
        loss = (1 - x) ** 2 + 100 * (y - x**2) ** 2
        loss.backward()
        return loss

    start = closure().item()
    for _ in range(150):
        optimizer.step(closure)
    assert closure().item() < 0.01 * start


@each_name
def test_options_reach_the_optimizer(name: str) -> None:
    options = {"kappa": "ki0x2", "regularizer": "std", "mu": 0.5, "adaptive": True}
    options |= {} if "muon" in name else {"fused": False}
    optimizer = create_optimizer_v2(
        small_model(), name, lr=1e-3, betas=(0.8, 0.9), eps=1e-6, momentum=0.7, **options
    )
    expected = {} if "sgd" in name else {"betas": (0.8, 0.9), "eps": 1e-6}
    expected |= {} if "adam" in name else {"momentum": 0.7}
    for group in optimizer.param_groups:
        assert {key: group[key] for key in (*options, *expected)} == {**options, **expected}


@pytest.mark.parametrize("options", [{"foreach": True}, {"dampening": 0.5}, {"kapa": "ws9"}], ids=str)
@each_name
def test_unknown_options_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        create_optimizer_v2(small_model(), name, lr=1e-3, **options)


# Lookahead


@each_base_name
def test_lookahead_averages_every_sixth_step(name: str) -> None:
    (params, closure), (others, other_closure) = linear_problem(), linear_problem()
    ahead = create(f"lookahead_{name}", "bound", params)
    plain = create(name, "bound", others)
    for _ in range(6):
        ahead.step(closure)
        plain.step(other_closure)
    assert_all_equal(params, others)
    slow = [p.detach().clone() for p in params]
    for _ in range(6):
        ahead.step(closure)
        plain.step(other_closure)
    for p, before, fast in zip(params, slow, others):
        torch.testing.assert_close(p, (before + fast) / 2)


# Schedulers


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda opt: CosineLRScheduler(opt, t_initial=6, warmup_t=2, warmup_lr_init=1e-4),
    "multistep": lambda opt: MultiStepLRScheduler(opt, decay_t=[2, 4], decay_rate=0.5),
    "plateau": lambda opt: PlateauLRScheduler(opt, decay_rate=0.5, patience_t=1),
    "poly": lambda opt: PolyLRScheduler(opt, t_initial=6),
    "step": lambda opt: StepLRScheduler(opt, decay_t=2, decay_rate=0.5, noise_range_t=4),
    "tanh": lambda opt: TanhLRScheduler(opt, t_initial=6),
}


def make_scheduler(name: str, optimizer: Any) -> Any:
    try:
        return SCHEDULERS[name](optimizer)
    except TypeError as error:
        if "verbose" not in str(error):
            raise
        pytest.skip("this timm passes ReduceLROnPlateau an option that this torch no longer has")


@pytest.mark.parametrize("scheduler_name", list(SCHEDULERS))
@each_name
def test_scheduled_rates_equal_those_of_torch(name: str, scheduler_name: str) -> None:
    rows = []
    for optimizer_name in (name, "adam" if "adam" in name else "momentum"):
        params, closure = linear_problem()
        groups = [{"params": params[:1], "lr_scale": 0.5}, {"params": params[1:]}]
        optimizer = create_optimizer_v2(groups, optimizer_name, lr=1e-3)
        scheduler = make_scheduler(scheduler_name, optimizer)
        before = closure().item()
        row = []
        for epoch in range(6):
            optimizer.step(closure)
            scheduler.step(epoch + 1, metric=float(epoch % 3))
            row.append([group["lr"] for group in optimizer.param_groups])
        rows.append(row)
        assert closure().item() < before
    assert rows[0] == rows[1]


@each_name
def test_scheduler_factory_scales_layer_decay(name: str) -> None:
    model = vit()
    optimizer = create_optimizer_v2(model, name, lr=1e-3, layer_decay=0.5, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=10, warmup_epochs=0)
    train_vit(model, optimizer, steps=1)
    scheduler.step(5)
    rates = {group["lr_scale"]: group["lr"] for group in optimizer.param_groups}
    assert len(rates) > 2
    for scale, rate in rates.items():
        assert rate == pytest.approx(rates[1.0] * scale)
    train_vit(model, optimizer, steps=1)
