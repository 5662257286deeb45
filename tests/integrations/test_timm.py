from __future__ import annotations

import argparse
import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.optim import create_optimizer, create_optimizer_v2, list_optimizers, optimizer_kwargs
from timm.scheduler import CosineLRScheduler, create_scheduler_v2
from timm.utils import CheckpointSaver, ParseKwargs
from torch import nn

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS, MuonCPR
from nnunet_cpr.bounds import as_bound
from nnunet_cpr.integrations import timm as timm_optimizers
from nnunet_cpr.names import WrongName
from nnunet_cpr.param_groups import regularized

NAMES = ["adamcpr", "muoncpr", "sgdcpr"]
RATES = {"adamcpr": 1e-3, "muoncpr": 3e-3, "sgdcpr": 1e-3}


def vit(seed: int = 0) -> nn.Module:
    """Return a ViT with ``pos_embed`` and ``cls_token``, to which timm applies no weight decay."""
    torch.manual_seed(seed)
    size = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **size)


def cpr_of(optimizer: Any) -> CPR:
    return getattr(optimizer, "_base_optimizer", optimizer).cpr


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


# Creation


def test_timm_lists_cpr_optimizers() -> None:
    assert set(NAMES) <= set(list_optimizers())
    described = dict(list_optimizers("*cpr", with_description=True))
    assert all("Constrained Parameter Regularization" in described[name] for name in NAMES)


def test_registering_again_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    create = timm_optimizers.default_registry.create_optimizer
    with caplog.at_level(logging.WARNING):
        timm_optimizers.register()
    assert not caplog.records
    assert timm_optimizers.default_registry.create_optimizer is create


def test_options_are_passed_on() -> None:
    optimizer = create_optimizer_v2(
        vit(),
        "adamcpr",
        lr=3e-3,
        weight_decay=0.05,
        betas=[0.8, 0.9],
        eps=1e-6,
        kappa=KappaWS(7),
        mu=0.5,
        regularizer="std",
        adaptive=True,
        amsgrad=True,
        fused=False,
    )
    assert isinstance(optimizer, AdamCPR)
    for group in optimizer.param_groups:
        assert (group["lr"], group["eps"], group["weight_decay"]) == (3e-3, 1e-6, 0)
        assert tuple(group["betas"]) == (0.8, 0.9)
        assert group["amsgrad"] and not group["fused"]
    cpr = optimizer.cpr
    assert (cpr.bound, cpr.mu, cpr.regularizer.name, cpr.adaptive) == (KappaWS(7), 0.5, "std", True)


def test_sgdcpr_has_timms_momentum() -> None:
    optimizer = create_optimizer_v2(vit(), "sgdcpr", lr=0.1, kappa="ip5", eps=1e-8, betas=(0.9, 0.9))
    assert isinstance(optimizer, SGDCPR)
    assert optimizer.cpr.bound == KappaIP(5)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.1, 0.9, True)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_the_library(name: str) -> None:
    optimizer = create_optimizer_v2(vit(), name)
    assert optimizer.cpr.bound == KappaWS(1000)
    assert {group["lr"] for group in optimizer.param_groups} == {RATES[name]}
    copy.deepcopy(optimizer.defaults)  # timm's script logs such a copy


def test_other_optimizers_are_unchanged() -> None:
    assert type(create_optimizer_v2(vit(), "adamw", lr=1e-3, weight_decay=0.05)) is torch.optim.AdamW


def test_optimizer_class_is_available() -> None:
    model = vit()
    assert timm.optim.get_optimizer_class("sgdcpr")(model.parameters(), lr=0.1).cpr.bound == KappaWS(
        1000
    )
    assert timm.optim.get_optimizer_class("adamcpr")(model, kappa="k2").cpr.names == list(
        regularized(model)
    )


# Bounds as strings


@pytest.mark.parametrize(
    ("word", "bound"),
    [("ws6280", KappaWS(6280)), ("ip50", KappaIP(50)), ("k0p1", KappaK(0.1)), ("ki0x2", KappaKI0(2.0))],
)
def test_bound_is_parsed_from_a_string(word: str, bound: Any) -> None:
    assert as_bound(word) == bound
    assert create_optimizer_v2(vit(), "adamcpr", kappa=word).cpr.bound == bound


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("k0.1", "unknown bound 'k0.1'; choose from k<V>"),
        ("ws0", "bound 'ws0': KappaWS.steps: expected a positive whole number, got 0"),
        ("warm", "choose from k<V> ki0x<V> ws<N> ip<N>, where <N>"),
        ("ws\n5", "unknown bound"),
        (0.1, "kappa: expected a bound such as KappaWS(1000) or a word such as 'ws1000', got 0.1"),
        (None, "or a word such as 'ws1000', got None"),
    ],
)
def test_wrong_bound_is_one_line(word: Any, message: str) -> None:
    with pytest.raises((WrongName, TypeError)) as caught:
        create_optimizer_v2(vit(), "adamcpr", kappa=word)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adaptive": "false"}, "adaptive: expected a number, True or False, got 'false'"),
        ({"mu": "much"}, "mu: expected a number, True or False, got 'much'"),
        ({"regularizer": "l3"}, "unknown regularizer 'l3'"),
        ({"foreach": True}, "AdamCPR has no foreach"),
        ({"foreach": False}, "AdamCPR has no foreach"),
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
    {"layer_decay": 0.7, "weight_decay": 0.05},
    {"weight_decay": 0.05, "filter_bias_and_bn": False},
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


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_embeddings_are_not_regularized(weight_decay: float) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm((4, 4)))
    optimizer = create_optimizer_v2(model, "sgdcpr", lr=0.1, weight_decay=weight_decay)
    assert optimizer.cpr.names == ["1.weight"]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_param_group_fn_may_leave_out_more() -> None:
    model = vit()
    groups = [
        {"params": model.blocks.parameters(), "weight_decay": 0.0, "lr": 1e-4},
        {"params": model.head.parameters()},
        {"params": [nn.Parameter(torch.zeros(3, 3))]},  # such as one of the loss
    ]
    optimizer = create_optimizer_v2(
        model, "adamcpr", lr=1e-3, weight_decay=0.05, param_group_fn=lambda _: groups
    )
    assert optimizer.cpr.names == ["head.weight", "2.0"]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, 1e-3, 1e-3]


def test_names_without_a_model_are_positions() -> None:
    model = vit()
    listed = create_optimizer_v2(model.parameters(), "adamcpr")
    assert listed.cpr.names[0] == "0"  # cls_token, which is not known as such without the model
    groups = [{"params": list(model.norm.parameters())}, {"params": list(model.head.parameters())}]
    assert create_optimizer_v2(groups, "adamcpr").cpr.names == ["1.0"]


def test_frozen_parameters_are_not_regularized() -> None:
    model = vit()
    model.blocks.requires_grad_(False)
    for grouping in GROUPINGS:
        cpr = create_optimizer_v2(model, "adamcpr", **grouping).cpr
        assert cpr.names == ["patch_embed.proj.weight", "head.weight"]


def test_layer_decay_scales_rates_under_timms_schedule() -> None:
    model = vit()
    optimizer = create_optimizer_v2(model, "adamcpr", lr=1e-3, layer_decay=0.5, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=10, min_lr=1e-5)
    for epoch in range(4):
        scheduler.step(epoch)
        base = CosineLRScheduler(torch.optim.SGD(model.parameters(), lr=1e-3), 10, lr_min=1e-5)
        (rate,) = base._get_lr(epoch)
        scales = {group["lr_scale"] for group in optimizer.param_groups}
        assert scales == {0.125, 0.25, 0.5, 1.0}
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(rate * group["lr_scale"])


# Training


@pytest.mark.parametrize(
    "grouping", GROUPINGS[:2], ids=lambda options: "-".join(map(str, options)) or "nothing"
)
@pytest.mark.parametrize("name", NAMES)
def test_training_equals_direct_construction(name: str, grouping: dict[str, Any]) -> None:
    model, twin = vit(), vit()
    optimizer = create_optimizer_v2(model, name, lr=0.01, kappa="ki0x1", mu=0.5, **grouping)
    build: Any = {"adamcpr": AdamCPR, "muoncpr": MuonCPR, "sgdcpr": SGDCPR}[name]
    momentum = {} if name == "adamcpr" else {"momentum": 0.9}
    direct = build(twin, 0.01, **momentum, kappa=KappaKI0(1.0), mu=0.5)
    assert optimizer.cpr.names == direct.cpr.names
    train(model, optimizer, range(4))
    train(twin, direct, range(4))
    assert_same_training((model, optimizer), (twin, direct))
    if not grouping:
        direct.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["adamcpr", "muoncpr", "sgdcpr", "lookahead_adamcpr"])
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


def test_checkpoint_of_another_bound_is_refused() -> None:
    saved = create_optimizer_v2(vit(), "adamcpr", kappa="ws3").state_dict()
    with pytest.raises(ValueError, match="kappa"):
        create_optimizer_v2(vit(), "adamcpr", kappa="ws4").load_state_dict(saved)


def test_lookahead_moves_between_corrected_steps() -> None:
    model, twin = vit(), vit()
    ahead = create_optimizer_v2(model, "lookahead_adamcpr", lr=0.01, kappa="ki0x1")
    plain = create_optimizer_v2(twin, "adamcpr", lr=0.01, kappa="ki0x1")
    train(model, ahead, range(6))
    train(twin, plain, range(6))
    assert_same_training((model, ahead), (twin, plain))  # the first move sets the slow weights
    slow = [p.detach().clone() for p in model.parameters()]
    train(model, ahead, range(6, 12))
    train(twin, plain, range(6, 12))
    for p, fast, before in zip(model.parameters(), twin.parameters(), slow):
        torch.testing.assert_close(p, (before + fast) / 2)
    assert torch.equal(cpr_of(ahead).lagrange_multiplier, plain.cpr.lagrange_multiplier)
    train(model, ahead, range(12, 13))  # measures the moved weights, not those after the step
    train(twin, plain, range(12, 13))
    assert not torch.equal(cpr_of(ahead).lagrange_multiplier, plain.cpr.lagrange_multiplier)


# From a command line


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt", default="sgd")
    parser.add_argument("--opt-betas", type=float, nargs="+", default=None)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=2e-5)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--opt-kwargs", nargs="*", default={}, action=ParseKwargs)
    return parser.parse_args(words)


def test_optimizer_is_created_from_timms_arguments() -> None:
    words = (
        "--opt adamcpr --opt-betas 0.9 0.98 --opt-kwargs kappa=ki0x2 mu=1 adaptive=True regularizer=std"
    )
    args = arguments(*words.split())
    cpr = create_optimizer_v2(vit(), **optimizer_kwargs(cfg=args), **args.opt_kwargs).cpr
    assert (cpr.bound, cpr.mu, cpr.regularizer.name, cpr.adaptive) == (KappaKI0(2.0), 1.0, "std", True)
    assert create_optimizer(args, vit()).cpr.bound == KappaWS(1000)
