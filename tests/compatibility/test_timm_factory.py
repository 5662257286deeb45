"""Checks of timm's optimizer factory on ``adamcpr``, ``muoncpr``, ``sgdcpr`` and with Lookahead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
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
    create_scheduler_v2,
)
from timm.utils import CheckpointSaver
from torch import nn

import nnunet_cpr.integrations.timm  # noqa: F401 (registers the optimizers)
from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaKI0, KappaWS, MuonCPR
from nnunet_cpr.param_groups import regularized
from tests.compatibility.small_problems import (
    assert_all_equal,
    linear_problem,
    minimize,
    small_model,
)
from tests.helpers.client_training import assert_same

CLASSES = {"adamcpr": AdamCPR, "muoncpr": MuonCPR, "sgdcpr": SGDCPR}
NAMES = [*CLASSES, *(f"lookahead_{name}" for name in CLASSES)]
each_name = pytest.mark.parametrize("name", NAMES)
each_base_name = pytest.mark.parametrize("name", list(CLASSES))

Params = list[nn.Parameter]

# How a weight and a bias reach the factory, and its other arguments.
FACTORY_CALLS: dict[str, tuple[Callable[[Params], Any], dict[str, Any]]] = {
    "parameters": (lambda params: params, {"lr": 1e-3}),
    "groups": (
        lambda params: [{"params": [params[0]]}, {"params": [params[1]], "lr": 3e-3}],
        {"lr": 1e-3},
    ),
    "weight group, default learning rate": (lambda params: [{"params": params[0], "lr": 3e-3}], {}),
    "weight decay": (lambda params: params, {"lr": 1e-3, "momentum": 0.5, "weight_decay": 0.1}),
    "bound": (lambda params: params, {"lr": 1e-3, "kappa": "ki0x0p9", "mu": 0.1}),
}


def create(name: str, call: str, params: Params) -> Any:
    arrange, options = FACTORY_CALLS[call]
    return create_optimizer_v2(arrange(params), name, **options)


def base(optimizer: Any) -> Any:
    return getattr(optimizer, "_base_optimizer", optimizer)


@each_base_name
def test_registry_describes_and_builds_the_optimizer(name: str) -> None:
    assert set(CLASSES) == set(list_optimizers("*cpr"))
    info = get_optimizer_info(name)
    expected = {"adamcpr": (1, 1, 0), "muoncpr": (1, 1, 1), "sgdcpr": (0, 0, 1)}[name]
    assert (info.has_betas, info.has_eps, info.has_momentum) == expected and info.description
    optimizer_class = get_optimizer_class(name, bind_defaults=False)
    assert issubclass(optimizer_class, CLASSES[name])
    optimizer = create_optimizer_v2(small_model(), name)
    assert type(optimizer) is optimizer_class and optimizer.cpr.bound == KappaWS(1000)
    copy.deepcopy(optimizer.defaults)  # timm's script logs such a copy


@pytest.mark.parametrize("call", list(FACTORY_CALLS))
@each_name
def test_created_optimizer_minimizes_and_resumes(name: str, call: str) -> None:
    (params, closure), (others, other_closure) = linear_problem(), linear_problem()
    optimizer = create(name, call, params)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0}
    assert minimize(optimizer, closure) < 0
    with torch.no_grad():
        for p, other in zip(params, others):
            other.copy_(p)
    loaded = create(name, call, others)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(8):
        optimizer.step(closure)
        loaded.step(other_closure)
        assert_all_equal(params, others)
    assert_same(loaded.state_dict(), optimizer.state_dict())


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
    with pytest.raises(TypeError, match="kapa"):
        create_optimizer_v2(small_model(), name, lr=1e-3, kapa="ws9")


# Vision transformer


def vit(seed: int = 0) -> nn.Module:
    """Return a ViT with ``pos_embed`` and ``cls_token``, to which timm applies no weight decay."""
    torch.manual_seed(seed)
    size = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **size)


def cpr_of(optimizer: Any) -> CPR:
    return base(optimizer).cpr


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 32, 32, generator=generator)
        loss = nn.functional.cross_entropy(model(images), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step_update(step + 1)


def assert_same_training(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    parameters = dict(other[0].named_parameters())
    for name, p in one[0].named_parameters():
        assert torch.equal(p, parameters[name]), name
    first, second = cpr_of(one[1]), cpr_of(other[1])
    assert first.step_count == second.step_count
    order = [second.names.index(name) for name in first.names]
    assert torch.equal(first.kappa, second.kappa[order])
    assert torch.equal(first.lagrange_multiplier, second.lagrange_multiplier[order])
    assert first.kappa.isfinite().all() and first.lagrange_multiplier.max() > 0


# Bounds as strings


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ws0", "KappaWS.steps: expected a positive whole number, got 0"),
        ("warm", "choose from k<V> ki0x<V> ws<N> ip<N>, where <N>"),
        ("ws4p", "bound 'ws4p': only names know the training's length; write ws<N>"),
    ],
)
def test_wrong_bound_is_one_line(word: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        create_optimizer_v2(vit(), "adamcpr", kappa=word)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adaptive": "false"}, "adaptive: expected a number, True or False, got 'false'"),
        ({"foreach": True}, "AdamCPR has no foreach"),
        ({"dampening": 0.1}, "dampening"),
    ],
)
def test_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        create_optimizer_v2(vit(), "adamcpr", **options)


# Selection and names of parameters

GROUPINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.05},
    {"layer_decay": 0.7},
    {"param_group_fn": lambda model: model.named_parameters()},
]


@pytest.mark.parametrize(
    "grouping", GROUPINGS, ids=lambda options: "-".join(map(str, options)) or "nothing"
)
def test_models_matrices_are_selected_by_name(grouping: dict[str, Any]) -> None:
    model = vit()
    cpr = create_optimizer_v2(model, "adamcpr", **grouping).cpr
    assert dict(zip(cpr.names, cpr.parameters)) == regularized(model)
    assert "blocks.0.attn.qkv.weight" in cpr.names
    assert not {"pos_embed", "cls_token"} & set(cpr.names)


def test_layer_decay_scales_rates_under_timms_schedule() -> None:
    optimizer = create_optimizer_v2(vit(), "adamcpr", lr=1e-3, layer_decay=0.5, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=10, warmup_epochs=0)
    scheduler.step(5)
    rates = {group["lr_scale"]: group["lr"] for group in optimizer.param_groups}
    assert rates.keys() == {0.125, 0.25, 0.5, 1.0}
    for scale, rate in rates.items():
        assert rate == pytest.approx(rates[1.0] * scale)


# Training


@each_base_name
def test_training_equals_direct_construction(name: str) -> None:
    model, twin = vit(), vit()
    optimizer = create_optimizer_v2(model, name, lr=0.01, kappa="ki0x1", mu=0.5)
    build: Any = CLASSES[name]
    momentum = {} if name == "adamcpr" else {"momentum": 0.9}
    direct = build(twin, 0.01, **momentum, kappa=KappaKI0(1.0), mu=0.5)
    assert optimizer.cpr.names == direct.cpr.names
    train(model, optimizer, range(4))
    train(twin, direct, range(4))
    assert_same_training((model, optimizer), (twin, direct))
    direct.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["muoncpr", "lookahead_adamcpr"])
def test_resume_from_timms_checkpoint_is_bit_exact(name: str, tmp_path: Path) -> None:
    def start(seed: int) -> tuple[nn.Module, Any, Any]:
        model = vit(seed)
        options: dict[str, Any] = {"kappa": "ws3", "mu": 0.5, "adaptive": True}
        optimizer = create_optimizer_v2(
            model, name, lr=0.01, weight_decay=0.05, layer_decay=0.9, **options
        )
        rates = {"lr_min": 1e-4, "warmup_t": 4, "warmup_lr_init": 1e-3, "t_in_epochs": False}
        return model, optimizer, CosineLRScheduler(optimizer, 20, **rates)

    model, optimizer, scheduler = start(0)
    train(model, optimizer, range(9), scheduler)
    CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path)).save_checkpoint(0, metric=1.0)
    train(model, optimizer, range(9, 16), scheduler)

    resumed, other, scheduler = start(1)
    assert timm.models.resume_checkpoint(resumed, str(tmp_path / "last.pth.tar"), other) == 1
    scheduler.step_update(9)
    train(resumed, other, range(9, 16), scheduler)
    assert_same_training((model, optimizer), (resumed, other))
