"""The methods that the paper compares CPR with, each attached to any torch optimizer as CPR is.

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    optimizer = AdaDecay(model, weight_decay=1e-2, alpha=4.0).attach(optimizer)

To add one: write a subclass of :class:`Baseline` in a module of its own and list it in
:data:`BASELINES`; the nnU-Net trainers, the vision runs and the benchmark then know it by its keyword.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nnunet_cpr.baselines._base import Baseline
from nnunet_cpr.baselines.adadecay import AdaDecay
from nnunet_cpr.baselines.adaptive import AdaptiveWeightDecay
from nnunet_cpr.baselines.amos import amos
from nnunet_cpr.baselines.decoupled import CosineDecay, DecoupledDecay
from nnunet_cpr.baselines.rescaling import NormRescaling
from nnunet_cpr.param_groups import Params

__all__ = [
    "BASELINES",
    "AdaDecay",
    "AdaptiveWeightDecay",
    "Baseline",
    "CosineDecay",
    "DecoupledDecay",
    "NormRescaling",
    "amos",
]


@dataclass(frozen=True)
class Training:
    """What a baseline may need to know of the training it is built for."""

    params: Params
    weight_decay: float
    steps: int


@dataclass(frozen=True)
class Entry:
    """A baseline in the names of trainers and vision runs: ``_<keyword>`` or ``_<keyword><V>``.

    ``setting`` says what the number means, and is None where there is none; ``decays`` whether it
    takes a weight decay.
    """

    keyword: str
    build: Callable[[Training, float], Baseline]
    setting: str | None = None
    decays: bool = True


BASELINES: dict[str, Entry] = {
    entry.keyword: entry
    for entry in (
        Entry("decoupled", lambda t, _: DecoupledDecay(t.params, t.weight_decay)),
        Entry("adadecay", lambda t, v: AdaDecay(t.params, t.weight_decay, v), "alpha"),
        Entry("awd", lambda t, _: AdaptiveWeightDecay(t.params, t.weight_decay)),
        Entry(
            "cosine",
            lambda t, v: CosineDecay(t.params, t.weight_decay, v, steps=t.steps),
            "the last weight decay as a multiple of the first",
        ),
        Entry("rescale", lambda t, v: NormRescaling(t.params, v), "factor", decays=False),
    )
}
