"""ImageNet presets on a tiny data set in the layout of ImageNet."""

import dataclasses
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.tiny_data import CLASSES, write_imagenet

pytest.importorskip("timm")

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.vision.cosine_lr import learning_rate
from nnunet_cpr.vision.engine import train
from nnunet_cpr.vision.optimizer_factory import build_optimizer
from nnunet_cpr.vision.sweeps import SWEEPS
from nnunet_cpr.vision.task import CannotTrain, Options
from nnunet_cpr.vision.tasks import TASKS

PRESETS = ["deit-small", "deit-base", "clip-vit-b32"]
SMALL = {"model": "test_vit", "image_size": "32", "batch": "2", "pretrained": "no"}
TRAINING_IMAGES, ALL_TRAINING_IMAGES = 5, 1_281_167


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imagenet")
    write_imagenet(folder)
    return folder


def options(data, workers=0, **settings):
    return Options(data=data, workers=workers, settings={**SMALL, **settings})


def contents(folder, task, name):
    """Return the tables of a run, which do not contain times."""
    folder = folder / task / name
    return {file: (folder / file).read_bytes() for file in ("history.csv", "dynamics.csv")}


# Runs


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("deit-small", "AdamCPR_ws1_warmup1_3steps"),
        ("deit-base", "AdamW_wd0p05_warmup1_3steps"),
        ("clip-vit-b32", "AdamCPR_ip1_warmup1_3steps"),
    ],
)
def test_preset_trains_on_a_tiny_imagenet(task, name, data, tmp_path):
    result = train(TASKS[task], parse_run_name(name), tmp_path, options(data))
    assert result["step"] == 3
    assert 0 <= result["accuracy"] <= result["top5"] == 100  # there are only two classes
    assert math.isfinite(result["loss"]) and math.isfinite(result["train_loss"])


@pytest.mark.parametrize("task", PRESETS)
def test_every_run_of_the_tables_takes_a_step(task, data):
    setup = TASKS[task].setup(options(data))
    initial = {key: value.clone() for key, value in setup.model.state_dict().items()}
    batch = next(setup.epoch(0))
    for run in SWEEPS[task].runs():
        setup.model.load_state_dict(initial)
        optimizer = build_optimizer(setup.model, TASKS[task].complete(run), TASKS[task])
        setup.loss(setup.model, batch).backward()
        optimizer.step()
        weight = setup.model.state_dict()["patch_embed.proj.weight"]
        assert not torch.equal(weight, initial["patch_embed.proj.weight"]) and weight.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("task", PRESETS)
def test_real_model_takes_two_steps(task, data, tmp_path):
    settings = Options(data=data, settings={"batch": "2", "pretrained": "no"})
    result = train(TASKS[task], parse_run_name("AdamCPR_ws1_warmup1_2steps"), tmp_path, settings)
    assert result["step"] == 2 and math.isfinite(result["loss"])


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_run_equals_uninterrupted_run(workers, data, tmp_path):
    class Stopped(Exception):
        pass

    def stop_in_second_epoch(step, total):
        if step == 3:
            raise Stopped

    task, name = TASKS["deit-base"], "AdamCPR_ws1_warmup1_seed1_4steps"
    given = options(data, workers)
    train(task, parse_run_name(name), tmp_path / "whole", given)
    with pytest.raises(Stopped):
        train(task, parse_run_name(name), tmp_path / "stopped", given, stop_in_second_epoch)
    random.seed(7)  # a later process has another generator state
    np.random.seed(7)
    torch.manual_seed(7)
    train(task, parse_run_name(name), tmp_path / "stopped", given)
    assert contents(tmp_path / "whole", task.name, name) == contents(
        tmp_path / "stopped", task.name, name
    )


# Data


def test_epochs_differ_and_drop_the_incomplete_batch(data):
    setup = TASKS["deit-small"].setup(options(data))
    first, second = list(setup.epoch(0)), list(setup.epoch(1))
    assert len(first) == len(second) == TRAINING_IMAGES // 2
    assert first[0][0].shape == (2, 3, 32, 32)
    assert not torch.equal(first[0][0], second[0][0])


def test_deit_has_mixed_smoothed_labels_and_clip_plain_ones(data):
    _, targets = next(TASKS["deit-small"].setup(options(data)).epoch(0))
    assert targets.shape == (2, 2)
    torch.testing.assert_close(targets.sum(1), torch.ones(2))
    assert targets.min() >= 0.1 / 2 - 1e-6
    _, targets = next(TASKS["clip-vit-b32"].setup(options(data)).epoch(0))
    assert targets.dtype == torch.int64 and targets.shape == (2,)


def test_images_are_mixed_within_256_images(data, monkeypatch):
    from nnunet_cpr.vision.tasks import imagenet

    monkeypatch.setattr(imagenet, "_PER_GPU", 4)
    mix = imagenet._build_mix(TASKS["deit-small"].setup.args[0], 2)
    images = torch.arange(8.0)[:, None, None, None].expand(8, 3, 16, 16).clone()
    mixed, targets = mix(images, torch.tensor([0, 0, 1, 1, 1, 1, 1, 1]))
    assert mixed[:4].max() <= 3 and mixed[4:].min() >= 4
    assert targets.shape == (8, 2)


def test_augmentation_is_that_of_the_tables(data):
    def transforms(task):
        loader = TASKS[task].setup(options(data)).epoch.args[0]
        return {type(t).__name__ for t in loader.dataset.transform.transforms}, loader.random_erasing

    for task in PRESETS[:2]:
        names, erasing = transforms(task)
        assert "RandAugment" in names and "ColorJitter" not in names  # timm skips it beside RandAugment
        assert erasing.probability == 0.25 and erasing.per_pixel
    names, erasing = transforms("clip-vit-b32")
    assert not names & {"RandAugment", "ColorJitter", "RandomHorizontalFlip"} and erasing is None


class _ConstantModel(nn.Module):
    """Model with the same ten logits for every image, in decreasing order."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.arange(10, 0, -1.0))

    def forward(self, images):
        return self.logits.expand(len(images), 10)


def test_evaluation_matches_manual_count():
    from nnunet_cpr.vision.tasks.imagenet import _evaluate

    labels = torch.tensor([0, 0, 1, 4, 5, 9])
    batches = [(torch.zeros(len(part), 3, 8, 8), part) for part in labels.split(4)]  # 4 and 2
    with torch.no_grad():
        numbers = _evaluate(batches, _ConstantModel())
    normalizer = math.log(sum(math.exp(10 - k) for k in range(10)))
    losses = [normalizer - (10 - label) for label in labels.tolist()]
    assert numbers["accuracy"] == pytest.approx(100 * 2 / 6)
    assert numbers["top5"] == pytest.approx(100 * 4 / 6)
    assert numbers["loss"] == pytest.approx(sum(losses) / 6)


def test_evaluation_has_each_image_once_in_timms_crop(data):
    setup = TASKS["deit-small"].setup(options(data))
    loader = setup.evaluate.args[0]
    seen = torch.cat([labels for _, labels in loader])
    assert seen.tolist() == [0, 0, 0, 0, 1, 1]
    resize = loader.dataset.transform.transforms[0]
    assert resize.size == math.floor(32 / setup.model.pretrained_cfg["crop_pct"])
    clip = TASKS["clip-vit-b32"].setup(options(data)).evaluate.args[0]
    assert clip.dataset.transform.transforms[0].size == 32  # the whole shorter side, as in CLIP


# Settings


def test_sweeps_match_the_papers_tables():
    deit = "AdamW_wd5en3 AdamW_wd0p05 AdamW_wd0p5 "
    deit += "AdamCPR_ws6280 AdamCPR_ws12560 AdamCPR_ws25120 AdamCPR_ip628"
    clip = "AdamW_wd1en4 AdamW_wd1en3 AdamW_wd0p01 AdamW_wd0p1 AdamW_wd1 "
    clip += "AdamCPR_ws500 AdamCPR_ws1000 AdamCPR_ws2000 AdamCPR_ip50"
    for name, runs in zip(PRESETS, (deit, deit, clip)):
        sweep = SWEEPS[name]
        assert [str(run) for run in sweep.runs()] == [f"{run}_seed1" for run in runs.split()]
        unpublished = {"AdamCPR_ws25120"} if name == "deit-base" else set()
        assert set(sweep.published) == set(runs.split()) - unpublished
    best = {name: max(SWEEPS[name].published, key=SWEEPS[name].published.get) for name in PRESETS}
    assert list(best.values()) == ["AdamCPR_ip628", "AdamCPR_ws6280", "AdamCPR_ws1000"]


def test_steps_match_the_paper():
    for name in PRESETS[:2]:
        task = TASKS[name]
        assert task.warmup == 6280 and task.steps == 300 / 5 * 6280
        assert (
            str(task.complete(parse_run_name("AdamW")))
            == "AdamW_lr1en3_wd0p05_warmup6280_seed1_376800steps"
        )
    # Eight workers on each of four GPUs, each with full batches of 256.
    assert 5 * 8 * math.ceil(math.ceil(ALL_TRAINING_IMAGES / 32) / 256) == 6280
    assert TASKS["clip-vit-b32"].steps == 10 * (ALL_TRAINING_IMAGES // 512)


def test_deit_schedule_is_close_to_timms():
    """The cosine of timm begins with the warm-up, ours after it (docs/reference/vision/imagenet.md)."""
    from timm.scheduler import CosineLRScheduler

    task, epoch = TASKS["deit-small"], 1256
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = CosineLRScheduler(
        optimizer, t_initial=task.steps, lr_min=1e-5, warmup_t=task.warmup, warmup_lr_init=1e-6
    )
    steps = range(0, task.steps, epoch)
    ours = [learning_rate(task, 1e-3, step, task.warmup, task.steps) for step in steps]
    differences = [abs(lr - theirs._get_lr(step)[0]) for lr, step in zip(ours, steps)]
    assert ours[0] == pytest.approx(1e-6, rel=0.2) and max(ours) == pytest.approx(1e-3, rel=1e-3)
    assert 0.01e-3 < max(differences) < 0.02e-3


def test_weights_are_loaded_from_a_file(data, tmp_path):
    import timm

    source = timm.create_model("test_vit", num_classes=7, img_size=32)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    file = str(tmp_path / "weights.pth")
    model = TASKS["clip-vit-b32"].setup(options(data, pretrained=file)).model
    assert model.head.out_features == len(CLASSES)
    assert torch.equal(model.patch_embed.proj.weight, source.patch_embed.proj.weight)


def test_clip_starts_from_openais_weights_and_activation(data, monkeypatch):
    import timm

    called = {}

    def create(name, pretrained, **arguments):
        called.update(arguments, name=name, pretrained=pretrained)
        raise OSError("no network\nsecond line")

    monkeypatch.setattr(timm, "create_model", create)
    with pytest.raises(CannotTrain, match=r"\(no network\); use --set pretrained=PATH"):
        TASKS["clip-vit-b32"].setup(Options(data=data, settings={"batch": "2"}))
    assert called["pretrained"] is True and "quickgelu" in called["name"]
    monkeypatch.undo()
    cfg = timm.get_pretrained_cfg(called["name"])
    assert cfg.hf_hub_id == "timm/vit_base_patch32_clip_224.openai"


def test_embeddings_are_not_regularized(data):
    from nnunet_cpr.param_groups import regularized

    names = list(regularized(TASKS["deit-small"].setup(options(data)).model))
    assert "patch_embed.proj.weight" in names and "head.weight" in names
    assert not {"pos_embed", "cls_token"} & set(names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": "two"}, "--set batch: expected a positive integer, got 'two'"),
        ({"batch": "3"}, "--set batch: expected an even number, got 3"),
        ({"batch": "64"}, "expected at least 64 training images, got 5; choose a smaller batch"),
        ({"model": "deit_huge"}, "--set model: unknown timm model 'deit_huge'"),
        ({"pretrained": "/no/file"}, "--set pretrained: expected yes, no or a file"),
    ],
)
def test_wrong_setting_is_one_line(settings, message, data):
    with pytest.raises(CannotTrain, match=message) as caught:
        TASKS["deit-small"].setup(options(data, **settings))
    assert "\n" not in str(caught.value)


def test_other_images_are_refused(data, tmp_path):
    task, name = TASKS["clip-vit-b32"], parse_run_name("AdamCPR_ws1_warmup1_2steps")
    train(task, name, tmp_path / "results", options(data))
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    (copy / "ORIGIN.txt").write_text("not an image")
    train(task, name, tmp_path / "results", options(copy))
    (copy / "val" / CLASSES[0] / "one_more.JPEG").write_bytes(b"")
    with pytest.raises(CannotTrain, match=r"expected .* data=12 files.*, got .* data=11 files \(\w+\)"):
        train(task, name, tmp_path / "results", options(copy))


@pytest.mark.parametrize("task", PRESETS)
def test_unknown_setting_is_one_line(task, data, tmp_path):
    with pytest.raises(
        CannotTrain, match=r"--set size: unknown setting of .*; choose from model, batch"
    ):
        train(TASKS[task], parse_run_name("AdamW"), tmp_path, options(data, size="3"))


def test_missing_data_is_one_line(data, tmp_path):
    setup = TASKS["deit-small"].setup
    with pytest.raises(CannotTrain, match=r"--data is missing: .* with DIR/train/CLASS"):
        setup(options(None))
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/train does not exist"):
        setup(options(tmp_path))
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: no images found"):
        setup(options(tmp_path))


def test_validation_of_other_classes_is_refused(data, tmp_path):
    (tmp_path / "train").symlink_to(data / "train")
    (tmp_path / "val").mkdir()
    Path(tmp_path / "val" / "one.JPEG").symlink_to(next((data / "val").rglob("*.JPEG")))
    with pytest.raises(FileNotFoundError, match="no images found"):  # not sorted into classes
        TASKS["deit-small"].setup(options(tmp_path))
    (tmp_path / "val" / "n00000000").symlink_to(data / "val" / CLASSES[0])
    with pytest.raises(CannotTrain, match="class n00000000 is missing in"):
        TASKS["deit-small"].setup(options(tmp_path))


def test_family_without_learning_rate_is_refused():
    with pytest.raises(WrongName, match="has no learning rate for SGD; add _lr<V>"):
        TASKS["deit-base"].complete(parse_run_name("SGD"))
    completed = TASKS["deit-base"].complete(parse_run_name("SGD_lr0p1"))
    assert dataclasses.asdict(completed)["lr"] == 0.1
