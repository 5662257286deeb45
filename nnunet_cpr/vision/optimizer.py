"""Optimizer of a run, by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nnunet_cpr.baselines import amos
from nnunet_cpr.cpr.algorithm import CPR
from nnunet_cpr.cpr.method import RegularizationMethod
from nnunet_cpr.cpr.regularized_parameters import regularized
from nnunet_cpr.integrations import from_timm
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.optimizers import SGDCPR, AdamCPR, FusedAdam, FusedSGD, Muon, MuonCPR
from nnunet_cpr.vision.task import Task


def build_optimizer(model: nn.Module, name: RunName, task: Task) -> Optimizer:
    """Return the optimizer of a completed name for all parameters of a model.

    Weight decay of every kind applies only to the matrices that CPR would regularize.

    Example:
        >>> from nnunet_cpr.names.run_name import parse_run_name
        >>> from nnunet_cpr.vision.tasks import TASKS
        >>> name = TASKS["digits"].complete(parse_run_name("AdamCPR_ws60"))
        >>> build_optimizer(nn.Linear(2, 2), name, TASKS["digits"]).cpr.bound
        KappaWS(steps=60)
    """
    assert name.lr is not None  # the name is complete
    training = name.training
    adam: dict[str, Any] = {"betas": task.betas}
    sgd: dict[str, Any] = {"momentum": training.momentum, "nesterov": True}
    muon = {**adam, "momentum": training.momentum}
    weight_decay = training.weight_decay or 0.0
    if name.timm is not None:
        decay = 0.0 if name.defaults.cpr or name.baseline else weight_decay
        chosen = from_timm.build(model.parameters(), name.timm, name.lr, decay, name.momentum)
        method: RegularizationMethod | None = training.build_baseline(model)
        if name.defaults.cpr:
            method = CPR(model, **training.cpr_settings)
        return chosen if method is None else method.attach(chosen)
    match name.family:
        case "AdamCPR":
            return AdamCPR(model, name.lr, **adam, **training.cpr_settings)
        case "SGDCPR":
            return SGDCPR(model, name.lr, **sgd, **training.cpr_settings)
        case "MuonCPR":
            return MuonCPR(model, name.lr, **muon, **training.cpr_settings)
        case "AMOS":
            return amos(model, name.lr, weight_decay)
    baseline = training.build_baseline(model)
    groups = _weight_decay_groups(model, 0.0 if baseline is not None else weight_decay)
    fused = all(p.device.type in ("cpu", "cuda") for p in model.parameters())
    optimizer: Optimizer
    if name.family == "Muon":
        optimizer = Muon(groups, name.lr, **muon, model=model)
    elif baseline is None and name.family == "AdamW":
        optimizer = torch.optim.AdamW(groups, name.lr, **adam, fused=fused)
    elif baseline is None:
        optimizer = torch.optim.SGD(groups, name.lr, **sgd, fused=fused)
    elif name.family == "AdamW":
        optimizer = FusedAdam(groups, name.lr, **adam)
    else:
        optimizer = FusedSGD(groups, name.lr, **sgd)
    return optimizer if baseline is None else baseline.attach(optimizer)


def _weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    matrices = {id(p) for p in regularized(model).values()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in matrices], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if id(p) not in matrices], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
