"""Optimizers to compare. To add one, list it in :data:`COMPETITORS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaKI0
from nnunet_cpr.baselines import (
    AdaDecay,
    AdaptiveWeightDecay,
    Baseline,
    CautiousDecay,
    CorrectedDecay,
    CosineDecay,
    DecoupledDecay,
    Hyperball,
    IndependentDecay,
    NormRescaling,
    WeightNormControl,
)
from nnunet_cpr.cpr.regularized_parameters import regularized
from nnunet_cpr.optimizers import FusedAdam, FusedSGD

Named = list[tuple[str, nn.Parameter]]

_LR = 1e-6
_SGD: dict[str, Any] = {"lr": _LR, "momentum": 0.99, "nesterov": True}
_LAMBDA = 1e-5


@dataclass(frozen=True)
class Competitor:
    """Optimizer to time, compared within its family."""

    name: str
    family: str
    build: Callable[[Named], Optimizer]


def _tensors(named: Named) -> list[nn.Parameter]:
    return [p for _, p in named]


def _adamw(**options: Any) -> Callable[[Named], Optimizer]:
    return lambda named: torch.optim.AdamW(_tensors(named), lr=_LR, weight_decay=1e-2, **options)


def _adam(**options: Any) -> Callable[[Named], Optimizer]:
    return lambda named: torch.optim.Adam(_tensors(named), lr=_LR, **options)


def _sgd(**options: Any) -> Callable[[Named], Optimizer]:
    return lambda named: torch.optim.SGD(_tensors(named), **_SGD, weight_decay=3e-5, **options)


def _activate(cpr: CPR, every: int = 1) -> None:
    """Give all or every second matrix a positive multiplier, which a tiny mu leaves as it is."""
    state = cpr.state_dict()
    state["state"]["lagrange_multiplier"][::every] = _LAMBDA
    if every > 1:  # the other matrices stay below their bounds
        state["state"]["kappa"] = cpr.measure * 2
    cpr.load_state_dict(state)


def _cpr(optimizer: type[SGDCPR] | type[AdamCPR], **options: Any) -> Callable[[Named], Optimizer]:
    def build(named: Named) -> Optimizer:
        built = optimizer(named, kappa=KappaKI0(0.5), mu=1e-12, **options)
        _activate(built.cpr)
        return built

    return build


def _hooked(
    optimizer: Callable[..., Optimizer], every: int = 1, **options: Any
) -> Callable[[Named], Optimizer]:
    def build(named: Named) -> Optimizer:
        cpr = CPR(named, kappa=KappaKI0(0.5), mu=1e-12)
        _activate(cpr, every)
        return cpr.attach(optimizer(_tensors(named), weight_decay=0.0, **options))

    return build


def _baselines(family: str, optimizer: Callable[[Named], Optimizer]) -> list[Competitor]:
    def build(baseline: Callable[[Named], Baseline]) -> Callable[[Named], Optimizer]:
        return lambda named: baseline(named).attach(optimizer(named))

    return [Competitor(title, family, build(own)) for title, own in {**ONE_FACTOR, **OTHERS}.items()]


def _corrected(named: Named) -> Baseline:
    return CorrectedDecay(named, normalized=list(regularized(named)))


def _authors(foreach: bool) -> Callable[[Named], Optimizer]:
    def build(named: Named) -> Optimizer:
        import pytorch_cpr

        # Its step calls this by the older of two names, which some versions of torch lack.
        if not hasattr(Optimizer, "_cuda_graph_capture_health_check"):
            check = Optimizer._accelerator_graph_capture_health_check
            pytorch_cpr.AdamCPR._cuda_graph_capture_health_check = check
        matrices = [p for _, p in named if p.ndim >= 2]
        others = [p for _, p in named if p.ndim < 2]
        groups = [{"params": matrices, "regularize": True}]
        groups += [{"params": others, "regularize": False}] if others else []
        return pytorch_cpr.AdamCPR(
            groups, lr=_LR, kappa_init_method="dependent", kappa_init_param=0.5, foreach=foreach
        )

    return build


def _amos(named: Named) -> Optimizer:
    import pytorch_optimizer

    return pytorch_optimizer.Amos(_tensors(named), lr=_LR)


ADAM, SGD = "Adam", "SGD"
ADAM_METHODS, SGD_METHODS = "Adam with comparison methods", "SGD with comparison methods"
BASE = {
    SGD: "SGD fused",
    SGD_METHODS: "SGD fused",
    ADAM: "AdamW fused",
    ADAM_METHODS: "AdamW fused",
}
"""Reference of a family's ratios: torch's fused step with weight decay."""

ONE_FACTOR: dict[str, Callable[[Named], Baseline]] = {
    "decoupled decay": DecoupledDecay,
    "cosine decay": lambda named: CosineDecay(named, steps=1000),
    "corrected decay": _corrected,
    "independent decay": IndependentDecay,
    "weight norm control": WeightNormControl,
    "AWD": AdaptiveWeightDecay,
}
"""Comparison methods that multiply each matrix by one number, in a fused step."""
OTHERS: dict[str, Callable[[Named], Baseline]] = {
    "AdaDecay": AdaDecay,
    "cautious decay": CautiousDecay,
    "hyperball": Hyperball,
    "rescaling": NormRescaling,
}

HALF_ACTIVE = "AdamW fused + CPR hook, half active"
COMPETITORS = [
    Competitor("AdamW fused", ADAM, _adamw(fused=True)),
    Competitor("AdamCPR", ADAM, _cpr(AdamCPR, lr=_LR)),
    Competitor("AdamW fused + CPR hook", ADAM, _hooked(torch.optim.AdamW, lr=_LR, fused=True)),
    Competitor(HALF_ACTIVE, ADAM, _hooked(torch.optim.AdamW, every=2, lr=_LR, fused=True)),
    Competitor("AdamW foreach + CPR hook", ADAM, _hooked(torch.optim.AdamW, lr=_LR, foreach=True)),
    Competitor("AdamW + CPR hook", ADAM, _hooked(torch.optim.AdamW, lr=_LR, foreach=False)),
    Competitor("Adam fused", ADAM, _adam(fused=True)),
    Competitor("AdamW foreach", ADAM, _adamw(foreach=True)),
    Competitor("AdamW default", ADAM, _adamw()),
    Competitor("pytorch-cpr AdamCPR, foreach", ADAM, _authors(foreach=True)),
    Competitor("pytorch-cpr AdamCPR, loop", ADAM, _authors(foreach=False)),
    Competitor("SGD fused", SGD, _sgd(fused=True)),
    Competitor("SGDCPR", SGD, _cpr(SGDCPR, **_SGD)),
    Competitor("SGD fused + CPR hook", SGD, _hooked(torch.optim.SGD, **_SGD, fused=True)),
    Competitor("SGD foreach + CPR hook", SGD, _hooked(torch.optim.SGD, **_SGD, foreach=True)),
    Competitor("SGD + CPR hook", SGD, _hooked(torch.optim.SGD, **_SGD, foreach=False)),
    Competitor("SGD foreach", SGD, _sgd(foreach=True)),
    Competitor("SGD as nnU-Net builds it", SGD, _sgd()),
    *_baselines(ADAM_METHODS, lambda named: FusedAdam(named, lr=_LR)),
    Competitor("AMOS", ADAM_METHODS, _amos),
    *_baselines(SGD_METHODS, lambda named: FusedSGD(named, **_SGD)),
]
IN_SWEEPS = ["AdamW fused", "AdamCPR", "AdamW fused + CPR hook", "pytorch-cpr AdamCPR, foreach"]
IN_SWEEPS += ["SGD fused", "SGDCPR", "SGD fused + CPR hook"]
