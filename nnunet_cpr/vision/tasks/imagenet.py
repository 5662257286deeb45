"""ImageNet on timm's models and data pipeline: DeiT-S and DeiT-B from scratch, CLIP ViT-B/32 fine-tuned.

The settings are those of the paper's tables. Settings that the tables leave out are those of the code
that the paper follows: DeiT (Touvron et al., 2021) and, for CLIP, WiSE-FT (Wortsman et al., 2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nnunet_cpr.vision.task import CannotTrain, Options, Setup, Task

_Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_PER_GPU = 256
"""Batch size of the paper on each GPU, for which timm draws one mixing proportion."""

_SETTINGS = ("model", "batch", "pretrained", "image_size")
_FOLDERS = ("train", "val")


@dataclass(frozen=True)
class _Recipe:
    """Arguments of a preset for timm; ``--set`` changes the first four.

    Attributes:
        model: timm's name of the model.
        batch: number of images in a step.
        pretrained: source of the weights: ``no``, ``yes`` (timm downloads them) or a file.
        image_size: side of the images in pixels; None for the model's default.
        architecture: further arguments of the model.
        augmentation: arguments of ``timm.data.create_loader`` for training.
        mixup: arguments of ``timm.data.Mixup``; None for no mixing.
        crop_pct: part of an image's side that is evaluated; None for the model's default.
    """

    model: str
    batch: int
    pretrained: str = "no"
    image_size: int | None = None
    architecture: Mapping[str, Any] = field(default_factory=dict)
    augmentation: Mapping[str, Any] = field(default_factory=dict)
    mixup: Mapping[str, Any] | None = None
    crop_pct: float | None = None

    def override(self, settings: Mapping[str, str]) -> _Recipe:
        """Return the recipe with the settings of ``--set``.

        Raises:
            CannotTrain: a setting has a wrong value.
        """
        values: dict[str, Any] = dict(settings)
        for key in ("batch", "image_size"):
            if key in values:
                values[key] = _positive_int(key, values[key])
        recipe = replace(self, **values)
        if recipe.mixup is not None and recipe.batch % 2:
            raise CannotTrain(f"--set batch: expected an even number, got {recipe.batch}")
        if recipe.pretrained not in ("no", "yes") and not Path(recipe.pretrained).is_file():
            raise CannotTrain(
                f"--set pretrained: expected yes, no or a file of weights, got {recipe.pretrained!r}"
            )
        return recipe


def _setup(recipe: _Recipe, options: Options) -> Setup:
    from timm.data import create_loader, resolve_data_config
    from timm.loss import SoftTargetCrossEntropy

    recipe = recipe.override(options.settings)
    train, val, classes = _datasets(options.data)
    if len(train) < recipe.batch:
        raise CannotTrain(
            f"{options.data}: expected at least {recipe.batch} training images, got {len(train)}; "
            "choose a smaller batch with --set batch=N"
        )
    model = _build_model(recipe, classes)
    config = resolve_data_config(
        {"img_size": recipe.image_size, "crop_pct": recipe.crop_pct}, model=model
    )
    # timm normalizes, erases and mixes on the device, one batch ahead; on the CPU this takes longer than
    # the training steps of an H200. Its worker processes end with each epoch, so that those of the next
    # epoch are seeded from torch's generator, which the engine has seeded.
    loading: dict[str, Any] = {
        "num_workers": options.workers,
        "device": options.device,
        "pin_memory": options.device.type == "cuda",
        "persistent_workers": False,
        **{key: config[key] for key in ("input_size", "mean", "std")},
    }
    batches = create_loader(
        train,
        batch_size=recipe.batch,
        is_training=True,
        interpolation="bicubic",
        **recipe.augmentation,
        **loading,
    )
    images = create_loader(
        val,
        batch_size=min(recipe.batch, _PER_GPU),
        **{key: config[key] for key in ("interpolation", "crop_pct", "crop_mode")},
        **loading,
    )
    criterion = nn.CrossEntropyLoss() if recipe.mixup is None else SoftTargetCrossEntropy()
    return Setup(
        model=model,
        epoch=functools.partial(_epoch, batches, _build_mix(recipe, classes)),
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        evaluate=functools.partial(_evaluate, images),
    )


def _datasets(data: Path | None) -> tuple[Any, Any, int]:
    """Return the training images, the validation images and the number of classes."""
    from timm.data import create_dataset

    layout = "DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG"
    if data is None:
        raise CannotTrain(f"--data is missing: name the folder of ImageNet, with {layout}")
    folders = [data / name for name in _FOLDERS]
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} does not exist; --data DIR expects {layout}")
    try:
        train = create_dataset("", root=str(folders[0]), search_split=False)
        classes = train.reader.class_to_idx
        # By default timm numbers the classes of val on their own. With the classes of train it silently
        # skips images of unknown classes.
        unknown = {path.name for path in folders[1].iterdir() if path.is_dir()} - set(classes)
        if unknown:
            raise CannotTrain(f"{folders[1]}: class {min(unknown)} is missing in {folders[0]}")
        val = create_dataset("", root=str(folders[1]), search_split=False, class_map=classes)
    except RuntimeError as error:
        if not str(error).startswith("Found 0 images"):
            raise
        raise FileNotFoundError(f"{data}: no images found; expected {layout}") from None
    return train, val, len(classes)


def _build_model(recipe: _Recipe, classes: int) -> nn.Module:
    import timm

    if not timm.is_model(recipe.model):
        raise CannotTrain(f"--set model: unknown timm model {recipe.model!r}; see timm.list_models()")
    options: dict[str, Any] = {**recipe.architecture, "num_classes": classes}
    config = timm.get_pretrained_cfg(recipe.model)
    if recipe.image_size and config is not None and config.fixed_input_size:
        options["img_size"] = recipe.image_size
    if recipe.pretrained not in ("no", "yes"):
        options["pretrained_cfg_overlay"] = {"file": recipe.pretrained}
    try:
        return timm.create_model(recipe.model, pretrained=recipe.pretrained != "no", **options)
    except Exception as error:  # from timm, the file, the hub client or the network
        if recipe.pretrained == "no":
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CannotTrain(
            f"the weights of {recipe.model} cannot be loaded ({reason}); use --set pretrained=PATH or "
            "--set pretrained=no"
        ) from error


def _build_mix(recipe: _Recipe, classes: int) -> _Mix | None:
    if recipe.mixup is None:
        return None
    from timm.data import Mixup

    mixup = Mixup(num_classes=classes, **recipe.mixup)

    def mix(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(images.split(_PER_GPU), labels.split(_PER_GPU))
        targets = [mixup(*pair)[1] for pair in pairs]  # mixes the images in place
        return images, torch.cat(targets)

    return mix


def _epoch(
    batches: Iterable[tuple[Tensor, Tensor]], mix: _Mix | None, number: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for images, labels in batches:
        yield (images, labels) if mix is None else mix(images, labels)


def _evaluate(batches: Iterable[tuple[Tensor, Tensor]], model: nn.Module) -> dict[str, float]:
    """Return top-1 accuracy and top-5 accuracy in percent, and the mean loss."""
    count, sums = 0, torch.zeros(3, dtype=torch.float64)
    for images, labels in batches:
        logits = model(images).float()
        correct = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([correct[:, 0].sum(), correct.sum(), loss]).cpu().double()
        count += len(labels)
    top1, top5, loss = (sums / count).tolist()
    return {"accuracy": 100 * top1, "top5": 100 * top5, "loss": loss}


def _positive_int(key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise CannotTrain(f"--set {key}: expected a positive integer, got {text!r}")
    return int(text)


_DEIT_AUGMENTATION = {"auto_augment": "rand-m9-mstd0.5", "re_prob": 0.25, "re_mode": "pixel"}
_MIXUP = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1}

# The paper's five warm-up epochs have 6,280 steps, so an epoch has 1,256. The training images fill 1,251
# batches of 4 x 256. With data in shards, each of 8 workers on each of 4 GPUs fills its last batch,
# which gives 8 * ceil(ceil(1,281,167 / 32) / 256) = 1,256 steps.
_DEIT_EPOCH = 1256


def _deit(name: str, about: str, recipe: _Recipe) -> Task:
    return Task(
        name=name,
        about=about,
        setup=functools.partial(_setup, recipe),
        steps=300 * _DEIT_EPOCH,
        warmup=5 * _DEIT_EPOCH,
        lr={"adam": 1e-3},
        first_lr=1e-6 / 1e-3,
        final_lr=1e-5 / 1e-3,
        weight_decay={"adam": 0.05},
        seeds=(1,),
        settings=_SETTINGS,
        path_settings=("pretrained",),
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
        # timm skips the color jitter beside RandAugment, which changes colors itself.
        augmentation={**_DEIT_AUGMENTATION, "color_jitter": 0.3},
        mixup=_MIXUP,
    ),
)

CLIP_VIT_B32 = Task(
    name="clip-vit-b32",
    about="OpenAI's CLIP ViT-B/32 fine-tuned on ImageNet, 10 epochs; needs timm and --data",
    setup=functools.partial(
        _setup,
        _Recipe(
            # The activation of OpenAI's training; timm's vit_base_patch32_clip_224.openai has the same
            # weights with another activation.
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
    path_settings=("pretrained",),
    data_folders=_FOLDERS,
)
