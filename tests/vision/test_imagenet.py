"""ImageNet's presets on a tiny data set in its layout: that they start, go on and count as they should,
not what they reach.
"""

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
from nnunet_cpr.vision.optimizers import build_optimizer
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


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def options(data, workers=0, **settings):
    return Options(data=data, workers=workers, settings={**SMALL, **settings})


def contents(folder, task, name):
    """What a run left but for the time that it took."""
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
    assert (
        0 <= result["accuracy"] <= result["top5"] == 100
    )  # of two classes, any is among the first five
    assert math.isfinite(result["loss"]) and math.isfinite(result["train_loss"])


@pytest.mark.parametrize("task", PRESETS)
def test_every_cell_of_the_tables_takes_a_step(task, data):
    prepared = TASKS[task].prepare(options(data))
    initial = {key: value.clone() for key, value in prepared.model.state_dict().items()}
    batch = next(prepared.epoch(0))
    for cell in SWEEPS[task].cells():
        prepared.model.load_state_dict(initial)
        optimizer = build_optimizer(prepared.model, TASKS[task].complete(cell), TASKS[task])
        prepared.loss(prepared.model, batch).backward()
        optimizer.step()
        weight = prepared.model.state_dict()["patch_embed.proj.weight"]
        assert not torch.equal(weight, initial["patch_embed.proj.weight"]) and weight.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("task", PRESETS)
def test_real_model_takes_two_steps(task, data, tmp_path):
    settings = Options(data=data, settings={"batch": "2", "pretrained": "no"})
    result = train(TASKS[task], parse_run_name("AdamCPR_ws1_warmup1_2steps"), tmp_path, settings)
    assert result["step"] == 2 and math.isfinite(result["loss"])


@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_run_goes_on_as_if_it_had_not_been(workers, data, tmp_path):
    class Stopped(Exception):
        pass

    def stop_in_second_epoch(step, steps, numbers):
        if step == 3:
            raise Stopped

    task, name = TASKS["deit-base"], "AdamCPR_ws1_warmup1_seed1_4steps"
    given = options(data, workers)
    train(task, parse_run_name(name), tmp_path / "whole", given)
    with pytest.raises(Stopped):
        train(task, parse_run_name(name), tmp_path / "stopped", given, stop_in_second_epoch)
    random.seed(7)  # a later session begins with other generators
    np.random.seed(7)
    torch.manual_seed(7)
    train(task, parse_run_name(name), tmp_path / "stopped", given)
    assert contents(tmp_path / "whole", task.name, name) == contents(
        tmp_path / "stopped", task.name, name
    )


# Data


def test_epochs_differ_and_leave_out_the_incomplete_batch(data):
    prepared = TASKS["deit-small"].prepare(options(data))
    first, second = list(prepared.epoch(0)), list(prepared.epoch(1))
    assert len(first) == len(second) == TRAINING_IMAGES // 2
    assert first[0][0].shape == (2, 3, 32, 32)
    assert not torch.equal(first[0][0], second[0][0])


def test_deit_gets_mixed_labels_smoothed_and_clip_gets_plain_ones(data):
    _, targets = next(TASKS["deit-small"].prepare(options(data)).epoch(0))
    assert targets.shape == (2, 2)
    torch.testing.assert_close(targets.sum(1), torch.ones(2))
    assert targets.min() >= 0.1 / 2 - 1e-6
    _, targets = next(TASKS["clip-vit-b32"].prepare(options(data)).epoch(0))
    assert targets.dtype == torch.int64 and targets.shape == (2,)


def test_images_are_mixed_within_the_batch_of_one_gpu(data, monkeypatch):
    from nnunet_cpr.vision.tasks import imagenet

    monkeypatch.setattr(imagenet, "_PER_GPU", 4)
    mix = imagenet._mixing(TASKS["deit-small"].prepare.args[0], 2)
    images = torch.arange(8.0)[:, None, None, None].expand(8, 3, 16, 16).clone()
    mixed, targets = mix(images, torch.tensor([0, 0, 1, 1, 1, 1, 1, 1]))
    assert mixed[:4].max() <= 3 and mixed[4:].min() >= 4
    assert targets.shape == (8, 2)


def test_augmentation_is_that_of_the_tables(data):
    def transforms(task):
        loader = TASKS[task].prepare(options(data)).epoch.args[0]
        return {type(t).__name__ for t in loader.dataset.transform.transforms}, loader.random_erasing

    for task in PRESETS[:2]:
        names, erasing = transforms(task)
        assert "RandAugment" in names and "ColorJitter" not in names  # timm's rule beside RandAugment
        assert erasing.probability == 0.25 and erasing.per_pixel
    names, erasing = transforms("clip-vit-b32")
    assert not names & {"RandAugment", "ColorJitter", "RandomHorizontalFlip"} and erasing is None


class _Knows(nn.Module):
    """Says the same of every image: class 0 likeliest, then 1, and so on, of ten."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.arange(10, 0, -1.0))

    def forward(self, images):
        return self.logits.expand(len(images), 10)


def test_evaluation_counts_by_hand():
    from nnunet_cpr.vision.tasks.imagenet import _evaluate

    labels = torch.tensor([0, 0, 1, 4, 5, 9])
    batches = [(torch.zeros(len(part), 3, 8, 8), part) for part in labels.split(4)]  # 4 and 2
    with torch.no_grad():
        numbers = _evaluate(batches, _Knows())
    normalizer = math.log(sum(math.exp(10 - k) for k in range(10)))
    losses = [normalizer - (10 - label) for label in labels.tolist()]
    assert numbers["accuracy"] == pytest.approx(100 * 2 / 6)
    assert numbers["top5"] == pytest.approx(100 * 4 / 6)
    assert numbers["loss"] == pytest.approx(sum(losses) / 6)


def test_evaluation_sees_each_image_once_in_timms_crop(data):
    prepared = TASKS["deit-small"].prepare(options(data))
    loader = prepared.evaluate.args[0]
    seen = torch.cat([labels for _, labels in loader])
    assert seen.tolist() == [0, 0, 0, 0, 1, 1]
    resize = loader.dataset.transform.transforms[0]
    assert resize.size == math.floor(32 / prepared.model.pretrained_cfg["crop_pct"])
    clip = TASKS["clip-vit-b32"].prepare(options(data)).evaluate.args[0]
    assert clip.dataset.transform.transforms[0].size == 32  # the whole shorter side, as CLIP's own


# Settings


def test_sweeps_are_the_papers_tables():
    deit = "AdamW_wd5en3 AdamW_wd0p05 AdamW_wd0p5 "
    deit += "AdamCPR_ws6280 AdamCPR_ws12560 AdamCPR_ws25120 AdamCPR_ip628"
    clip = "AdamW_wd1en4 AdamW_wd1en3 AdamW_wd0p01 AdamW_wd0p1 AdamW_wd1 "
    clip += "AdamCPR_ws500 AdamCPR_ws1000 AdamCPR_ws2000 AdamCPR_ip50"
    for name, cells in zip(PRESETS, (deit, deit, clip)):
        sweep = SWEEPS[name]
        assert [str(cell) for cell in sweep.cells()] == [f"{cell}_seed1" for cell in cells.split()]
        unknown = {"AdamCPR_ws25120"} if name == "deit-base" else set()
        assert set(sweep.published) == set(cells.split()) - unknown
    best = {name: max(SWEEPS[name].published, key=SWEEPS[name].published.get) for name in PRESETS}
    assert list(best.values()) == ["AdamCPR_ip628", "AdamCPR_ws6280", "AdamCPR_ws1000"]


def test_steps_are_the_papers():
    for name in PRESETS[:2]:
        task = TASKS[name]
        assert task.warmup == 6280 and task.steps == 300 / 5 * 6280
        assert (
            str(task.complete(parse_run_name("AdamW")))
            == "AdamW_lr1en3_wd0p05_warmup6280_seed1_376800steps"
        )
    # Eight loading processes on each of four GPUs, each with whole batches of 256.
    assert 5 * 8 * math.ceil(math.ceil(ALL_TRAINING_IMAGES / 32) / 256) == 6280
    assert TASKS["clip-vit-b32"].steps == 10 * (ALL_TRAINING_IMAGES // 512)


def test_deit_schedule_is_close_to_timms():
    """timm's cosine begins with the warm-up, the engine's after it, as docs/vision-imagenet.md says."""
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


def test_weights_come_from_a_file(data, tmp_path):
    import timm

    source = timm.create_model("test_vit", num_classes=7, img_size=32)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    file = str(tmp_path / "weights.pth")
    model = TASKS["clip-vit-b32"].prepare(options(data, pretrained=file)).model
    assert model.head.out_features == len(CLASSES)
    assert torch.equal(model.patch_embed.proj.weight, source.patch_embed.proj.weight)


def test_clip_starts_from_openais_weights_and_activation(data, monkeypatch):
    import timm

    asked = {}

    def create(name, pretrained, **arguments):
        asked.update(arguments, name=name, pretrained=pretrained)
        raise OSError("no network\nand more")

    monkeypatch.setattr(timm, "create_model", create)
    with pytest.raises(CannotTrain, match=r"\(no network\); --set pretrained=PATH"):
        TASKS["clip-vit-b32"].prepare(Options(data=data, settings={"batch": "2"}))
    assert asked["pretrained"] is True and "quickgelu" in asked["name"]
    monkeypatch.undo()
    cfg = timm.get_pretrained_cfg(asked["name"])
    assert cfg.hf_hub_id == "timm/vit_base_patch32_clip_224.openai"


def test_embeddings_are_not_regularized(data):
    from nnunet_cpr.param_groups import regularized

    names = list(regularized(TASKS["deit-small"].prepare(options(data)).model))
    assert "patch_embed.proj.weight" in names and "head.weight" in names
    assert not {"pos_embed", "cls_token"} & set(names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": "two"}, "batch=two is no whole number above 0"),
        ({"batch": "3"}, "batch=3 is odd"),
        ({"batch": "64"}, "5 images to train on, fewer than a batch of 64"),
        ({"model": "deit_huge"}, "timm knows no model 'deit_huge'"),
        ({"pretrained": "/no/file"}, "neither yes, nor no, nor a file"),
    ],
)
def test_wrong_setting_is_one_clear_line(settings, message, data):
    with pytest.raises(CannotTrain, match=message) as told:
        TASKS["deit-small"].prepare(options(data, **settings))
    assert "\n" not in str(told.value)


def test_other_images_are_noticed(data, tmp_path):
    task, name = TASKS["clip-vit-b32"], parse_run_name("AdamCPR_ws1_warmup1_2steps")
    train(task, name, tmp_path / "results", options(data))
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    (copy / "ORIGIN.txt").write_text("not an image, and beside them")
    train(task, name, tmp_path / "results", options(copy))
    (copy / "val" / CLASSES[0] / "one_more.JPEG").write_bytes(b"")
    with pytest.raises(CannotTrain, match=r"data=11 files \(\w+\).*, not of .* data=12 files"):
        train(task, name, tmp_path / "results", options(copy))


@pytest.mark.parametrize("task", PRESETS)
def test_unknown_setting_is_one_clear_line(task, data, tmp_path):
    with pytest.raises(CannotTrain, match=r"no setting 'size'; there are model, batch, pretrained"):
        train(TASKS[task], parse_run_name("AdamW"), tmp_path, options(data, size="3"))


def test_missing_data_is_one_clear_line(data, tmp_path):
    prepare = TASKS["deit-small"].prepare
    with pytest.raises(CannotTrain, match="--data DIR, with DIR/train/CLASS"):
        prepare(options(None))
    with pytest.raises(FileNotFoundError, match=f"no folder {tmp_path}/train"):
        prepare(options(tmp_path))
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no images"):
        prepare(options(tmp_path))


def test_validation_that_does_not_fit_is_refused(data, tmp_path):
    (tmp_path / "train").symlink_to(data / "train")
    (tmp_path / "val").mkdir()
    Path(tmp_path / "val" / "one.JPEG").symlink_to(next((data / "val").rglob("*.JPEG")))
    with pytest.raises(FileNotFoundError, match="has no images in"):  # as it lies in ImageNet's archive
        TASKS["deit-small"].prepare(options(tmp_path))
    (tmp_path / "val" / "n00000000").symlink_to(data / "val" / CLASSES[0])
    with pytest.raises(CannotTrain, match="has a class n00000000"):
        TASKS["deit-small"].prepare(options(tmp_path))


def test_optimizer_without_a_learning_rate_is_told():
    with pytest.raises(WrongName, match="no learning rate for SGD; say it with _lr"):
        TASKS["deit-base"].complete(parse_run_name("SGD"))
    completed = TASKS["deit-base"].complete(parse_run_name("SGD_lr0p1"))
    assert dataclasses.asdict(completed)["lr"] == 0.1
