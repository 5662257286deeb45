"""timm's optimizer factory with ``adamcpr``, ``muoncpr``, ``sgdcpr`` and Lookahead."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver
from torch import nn

import nnunet_cpr.integrations.timm  # noqa: F401 (registers the optimizers)
from nnunet_cpr import SGDCPR, AdamCPR, KappaWS, MuonCPR
from nnunet_cpr.cpr.regularized_parameters import regularized
from tests.helpers.matrices import set_gradients
from tests.helpers.resume_cases import differences

CLASSES: dict[str, Any] = {"adamcpr": AdamCPR, "muoncpr": MuonCPR, "sgdcpr": SGDCPR}
each_name = pytest.mark.parametrize("name", list(CLASSES))


def vit(seed: int = 0) -> nn.Module:
    """Return a ViT with ``pos_embed`` and ``cls_token``, to which timm applies no weight decay."""
    torch.manual_seed(seed)
    size = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **size)


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any) -> None:
    for step in steps:
        set_gradients(model.parameters(), step)
        optimizer.step()
        scheduler.step_update(step + 1)


@each_name
def test_registry_describes_and_builds_the_optimizer_with_its_options(name: str) -> None:
    assert set(CLASSES) == set(list_optimizers("*cpr"))
    info = get_optimizer_info(name)
    has = {"adamcpr": (1, 1, 0), "muoncpr": (1, 1, 1), "sgdcpr": (0, 0, 1)}[name]
    assert (info.has_betas, info.has_eps, info.has_momentum) == has and info.description
    optimizer = create_optimizer_v2(vit(), name)
    assert isinstance(optimizer, CLASSES[name]) and optimizer.cpr.bound == KappaWS(1000)
    copy.deepcopy(optimizer.defaults)  # timm's script logs such a copy
    expected: dict[str, Any] = {"kappa": "ki0x2", "regularizer": "std", "mu": 0.5, "adaptive": True}
    expected |= {} if "sgd" in name else {"betas": (0.8, 0.9), "eps": 1e-6}
    expected |= {} if "adam" in name else {"momentum": 0.7}
    for group in create_optimizer_v2(vit(), name, lr=1e-3, **expected).param_groups:
        assert {key: group[key] for key in expected} == expected
    with pytest.raises(TypeError, match="kapa"):
        create_optimizer_v2(vit(), name, lr=1e-3, kapa="ws9")
    flag = {"adamcpr": "amsgrad", "muoncpr": "adaptive", "sgdcpr": "nesterov"}[name]
    with pytest.raises(ValueError, match=f"{flag}: expected a number, True or False, got 'false'"):
        create_optimizer_v2(vit(), name, lr=1e-3, **{flag: "false"})  # as from a command line


@pytest.mark.parametrize("name", CLASSES)
def test_options_that_take_strings_are_passed_as_strings(name: str) -> None:
    """Every option of the optimizer whose annotation has a string, as from a command line."""
    values = {
        "kappa": "k0p1",
        "regularizer": "l1",
        "adjust_lr": "original",
        "ns_coefficients": "polar_express",
        "ns_dtype": "bfloat16",
        "adamw_for": "first",
    }
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    takes_text = [p.name for p in parameters if re.search(r"\bstr\b|Coefficients", str(p.annotation))]
    assert {"kappa", "regularizer"} <= set(takes_text)
    for option in takes_text:
        optimizer = create_optimizer_v2(vit(), name, lr=1e-3, **{option: values[option]})
        used = optimizer.param_groups[0][option]
        assert used in (values[option], (values[option],))


@pytest.mark.parametrize(
    "grouping", [{}, {"weight_decay": 0.05, "layer_decay": 0.7}], ids=["", "layers"]
)
def test_models_matrices_are_selected_by_name(grouping: dict[str, Any]) -> None:
    model = vit()
    model.table = nn.Embedding(5, 4)  # whose name does not tell its kind
    cpr = create_optimizer_v2(model, "adamcpr", **grouping).cpr
    assert dict(zip(cpr.names, cpr.parameters)) == regularized(model)
    assert "blocks.0.attn.qkv.weight" in cpr.names
    assert not {"pos_embed", "cls_token", "table.weight"} & set(cpr.names)


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
    assert differences(resumed.state_dict(), model.state_dict()) == []
    assert differences(other.state_dict(), optimizer.state_dict()) == []
