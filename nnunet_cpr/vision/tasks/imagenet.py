"""ImageNet on timm's models and data pipeline: DeiT-S and DeiT-B from scratch, CLIP ViT-B/32 fine-tuned.

The settings are those of the paper's tables. Where these are silent on one that has to have a value, it
is that of the code which the paper says it follows: DeiT's (Touvron et al., 2021) and, for CLIP,
WiSE-FT's (Wortsman et al., 2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nnunet_cpr.vision.task import CannotTrain, Options, Prepared, Task

_Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_PER_GPU = 256
"""The paper's batch on each of its GPUs, and so what timm mixes in one proportion."""

_SETTINGS = ("model", "batch", "pretrained", "image_size")
_FOLDERS = ("train", "val")


@dataclass(frozen=True)
class _Recipe:
    """What a preset hands to timm.

    Attributes:
        model: by timm's name.
        batch: images in a step.
        pretrained: where the weights come from unless the user says it: ``no``, ``yes`` or a file.
        architecture: further arguments of the model.
        augmentation: of ``timm.data.create_loader`` for training.
        mixup: of ``timm.data.Mixup``; None for images and labels as they are.
        crop_pct: part of an image's side that is evaluated; None for the model's own.
    """

    model: str
    batch: int
    pretrained: str = "no"
    architecture: Mapping[str, Any] = field(default_factory=dict)
    augmentation: Mapping[str, Any] = field(default_factory=dict)
    mixup: Mapping[str, Any] | None = None
    crop_pct: float | None = None


@dataclass(frozen=True)
class _Settings:
    """What ``--set`` may change."""

    model: str
    batch: int
    pretrained: str
    image_size: int | None

    @classmethod
    def read(cls, recipe: _Recipe, given: Mapping[str, str]) -> _Settings:
        settings = cls(
            model=given.get("model", recipe.model),
            batch=_whole_number("batch", given, recipe.batch),
            pretrained=given.get("pretrained", recipe.pretrained),
            image_size=_whole_number("image_size", given, 0) or None,
        )
        if recipe.mixup is not None and settings.batch % 2:
            raise CannotTrain(f"batch={settings.batch} is odd, and images are mixed in pairs")
        if settings.pretrained not in ("no", "yes") and not Path(settings.pretrained).is_file():
            raise CannotTrain(
                f"pretrained={settings.pretrained} is neither yes, nor no, nor a file of weights"
            )
        return settings


def _prepare(recipe: _Recipe, options: Options) -> Prepared:
    from timm.data import create_loader, resolve_data_config
    from timm.loss import SoftTargetCrossEntropy

    settings = _Settings.read(recipe, options.settings)
    train, val, classes = _datasets(options.data)
    if len(train) < settings.batch:
        raise CannotTrain(
            f"{options.data} has {len(train)} images to train on, fewer than a batch of "
            f"{settings.batch}; choose a smaller one with --set batch=N"
        )
    model = _model(recipe, settings, classes)
    config = resolve_data_config(
        {"img_size": settings.image_size, "crop_pct": recipe.crop_pct}, model=model
    )
    # timm normalises, erases and mixes on the device, one batch ahead: on the CPU, the images of an H200
    # would take longer than its training steps. Its processes end with each epoch, so that the next
    # epoch's are seeded anew, from what the engine seeded torch with.
    loading: dict[str, Any] = {
        "num_workers": options.workers,
        "device": options.device,
        "pin_memory": options.device.type == "cuda",
        "persistent_workers": False,
        **{key: config[key] for key in ("input_size", "mean", "std")},
    }
    batches = create_loader(
        train,
        batch_size=settings.batch,
        is_training=True,
        interpolation="bicubic",
        **recipe.augmentation,
        **loading,
    )
    images = create_loader(
        val,
        batch_size=min(settings.batch, _PER_GPU),
        **{key: config[key] for key in ("interpolation", "crop_pct", "crop_mode")},
        **loading,
    )
    criterion = nn.CrossEntropyLoss() if recipe.mixup is None else SoftTargetCrossEntropy()
    return Prepared(
        model=model,
        epoch=functools.partial(_epoch, batches, _mixing(recipe, classes)),
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        evaluate=functools.partial(_evaluate, images),
    )


def _datasets(data: Path | None) -> tuple[Any, Any, int]:
    """Images to train on, images to evaluate, and the number of classes."""
    from timm.data import create_dataset

    layout = "DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG"
    if data is None:
        raise CannotTrain(f"say where ImageNet is: --data DIR, with {layout}")
    folders = [data / name for name in _FOLDERS]
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}; --data DIR expects {layout}")
    try:
        train = create_dataset("", root=str(folders[0]), search_split=False)
        classes = train.reader.class_to_idx
        # By the classes of train: timm would number those of val for themselves, and leave out in
        # silence what has none.
        found = {path.name for path in folders[1].iterdir() if path.is_dir()}
        if found - set(classes):
            raise CannotTrain(
                f"{folders[1]} has a class {min(found - set(classes))}; {folders[0]} has not"
            )
        val = create_dataset("", root=str(folders[1]), search_split=False, class_map=classes)
    except RuntimeError as error:
        if not str(error).startswith("Found 0 images"):
            raise
        raise FileNotFoundError(f"{data} has no images in {layout}") from None
    return train, val, len(classes)


def _model(recipe: _Recipe, settings: _Settings, classes: int) -> nn.Module:
    import timm

    if not timm.is_model(settings.model):
        raise CannotTrain(f"timm knows no model {settings.model!r}")
    options: dict[str, Any] = {**recipe.architecture, "num_classes": classes}
    known = timm.get_pretrained_cfg(settings.model)
    if settings.image_size and known is not None and known.fixed_input_size:
        options["img_size"] = settings.image_size
    if settings.pretrained not in ("no", "yes"):
        options["pretrained_cfg_overlay"] = {"file": settings.pretrained}
    try:
        return timm.create_model(settings.model, pretrained=settings.pretrained != "no", **options)
    except Exception as error:  # of timm, the file's format, the hub's client or the network
        if settings.pretrained == "no":
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CannotTrain(
            f"the weights of {settings.model} cannot be loaded ({reason}); --set pretrained=PATH takes "
            "them from a file, and pretrained=no does without"
        ) from error


def _mixing(recipe: _Recipe, classes: int) -> _Mix | None:
    if recipe.mixup is None:
        return None
    from timm.data import Mixup

    mixup = Mixup(num_classes=classes, **recipe.mixup)

    def mix(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(images.split(_PER_GPU), labels.split(_PER_GPU))
        targets = [mixup(*pair)[1] for pair in pairs]  # the images are mixed in place
        return images, torch.cat(targets)

    return mix


def _epoch(
    batches: Iterable[tuple[Tensor, Tensor]], mix: _Mix | None, number: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for images, labels in batches:
        yield (images, labels) if mix is None else mix(images, labels)


def _evaluate(batches: Iterable[tuple[Tensor, Tensor]], model: nn.Module) -> dict[str, float]:
    """Percent of images whose class is the first, and among the first five, of the model's; the loss."""
    count, sums = 0, torch.zeros(3, dtype=torch.float64)
    for images, labels in batches:
        logits = model(images).float()
        right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([right[:, 0].sum(), right.sum(), loss]).cpu().double()
        count += len(labels)
    first, five, total = (sums / count).tolist()
    return {"accuracy": 100 * first, "top5": 100 * five, "loss": total}


def _whole_number(key: str, given: Mapping[str, str], default: int) -> int:
    text = given.get(key)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise CannotTrain(f"{key}={text} is no whole number above 0")
    return int(text)


_DEIT_AUGMENTATION = {"auto_augment": "rand-m9-mstd0.5", "re_prob": 0.25, "re_mode": "pixel"}
_MIXUP = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1}

# The paper calls 6,280 steps five epochs of warm-up, so its epochs have 1,256. The training images make
# 1,251 whole batches of 4 x 256. They make 1,256 where each of 8 loading processes on each of 4 GPUs
# fills its last batch, as timm does with data in shards: 8 * ceil(ceil(1,281,167 / 32) / 256).
_DEIT_EPOCH = 1256


def _deit(name: str, about: str, recipe: _Recipe) -> Task:
    return Task(
        name=name,
        about=about,
        prepare=functools.partial(_prepare, recipe),
        steps=300 * _DEIT_EPOCH,
        warmup=5 * _DEIT_EPOCH,
        lr={"adam": 1e-3},
        first_lr=1e-6 / 1e-3,
        final_lr=1e-5 / 1e-3,
        weight_decay={"adam": 0.05},
        seeds=(1,),
        settings=_SETTINGS,
        data_folders=_FOLDERS,
    )


DEIT_SMALL = _deit(
    "deit-small",
    "DeiT-S (22M) on ImageNet from scratch, 300 epochs; needs timm and --data",
    _Recipe(
        "deit_small_patch16_224",
        batch=4 * _PER_GPU,
        augmentation={**_DEIT_AUGMENTATION, "color_jitter": None},
        mixup=_MIXUP,
    ),
)

DEIT_BASE = _deit(
    "deit-base",
    "DeiT-B (86M) on ImageNet from scratch, 300 epochs; needs timm and --data",
    _Recipe(
        "deit_base_patch16_224",
        batch=4 * _PER_GPU,
        architecture={"drop_path_rate": 0.1},
        # timm leaves the jitter out beside RandAugment, which changes colours itself.
        augmentation={**_DEIT_AUGMENTATION, "color_jitter": 0.3},
        mixup=_MIXUP,
    ),
)

CLIP_VIT_B32 = Task(
    name="clip-vit-b32",
    about="OpenAI's CLIP ViT-B/32 fine-tuned on ImageNet, 10 epochs; needs timm and --data",
    prepare=functools.partial(
        _prepare,
        _Recipe(
            # With the activation that OpenAI trained it with; timm's vit_base_patch32_clip_224.openai
            # is the same weights with another one.
            "vit_base_patch32_clip_quickgelu_224.openai",
            batch=512,
            pretrained="yes",
            augmentation={"scale": (0.9, 1.0), "hflip": 0.0, "color_jitter": None},
            crop_pct=1.0,
        ),
    ),
    steps=10 * (1_281_167 // 512),
    warmup=500,
    lr={"adam": 3e-5},
    final_lr=0.0,
    weight_decay={"adam": 0.1},
    clip=1.0,
    seeds=(1,),
    settings=_SETTINGS,
    data_folders=_FOLDERS,
)
