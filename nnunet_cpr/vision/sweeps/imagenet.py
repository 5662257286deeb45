"""Sweeps of the paper's ImageNet tables, with the published results."""

from __future__ import annotations

from collections.abc import Sequence

from nnunet_cpr.bounds import KappaIP, KappaWS
from nnunet_cpr.vision.sweeps.sweep import AxisValues, Sweep, axis_values, grid
from nnunet_cpr.vision.task import Task
from nnunet_cpr.vision.tasks.imagenet import CLIP_VIT_B32, DEIT_BASE, DEIT_SMALL


def _imagenet(
    task: Task,
    about: str,
    weight_decays: Sequence[float],
    published: Sequence[float | None],  # in the order of the paper's table, None for no result
) -> Sweep:
    lr: tuple[str, AxisValues] = ("learning rate", {f"{task.lr['adam']:g}": {}})
    warm_starts = {
        f"{times * task.warmup}": {"kappa": KappaWS(times * task.warmup)} for times in (1, 2, 4)
    }
    panels = (
        grid("AdamW", ("weight decay", axis_values("weight_decay", weight_decays)), lr, "AdamW"),
        grid("AdamCPR, Kappa-WS", ("warm start (steps)", warm_starts), lr, "AdamCPR"),
        grid("AdamCPR, Kappa-IP", ("", {"IP": {"kappa": KappaIP(task.warmup // 10)}}), lr, "AdamCPR"),
    )
    names = [str(name) for panel in panels for row in panel.names for name in row]
    known = {name: number for name, number in zip(names, published, strict=True) if number is not None}
    return Sweep(task.name, about, task.name, panels, task.seeds, published=known)


IMAGENET_SWEEPS = (
    _imagenet(
        DEIT_SMALL,
        "ImageNet: DeiT-S with AdamW and AdamCPR",
        (0.005, 0.05, 0.5),
        (76.97, 79.03, 79.16, 79.81, 79.33, 78.04, 79.84),
    ),
    _imagenet(
        DEIT_BASE,
        "ImageNet: DeiT-B with AdamW and AdamCPR",
        (0.005, 0.05, 0.5),
        (76.19, 78.59, 80.56, 81.19, 79.61, None, 80.95),
    ),
    _imagenet(
        CLIP_VIT_B32,
        "ImageNet: CLIP ViT-B/32 fine-tuned with AdamW and AdamCPR",
        (1e-4, 1e-3, 1e-2, 0.1, 1.0),
        (75.24, 75.39, 75.32, 75.17, 74.4, 75.27, 75.52, 75.41, 75.40),
    ),
)
