"""Runs are trained, stopped, continued and recorded."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import FAMILIES, parse_run_name
from nnunet_cpr.vision import engine
from nnunet_cpr.vision.cosine_lr import warmup_cosine
from nnunet_cpr.vision.dynamics_figure import CannotDraw, draw_dynamics
from nnunet_cpr.vision.engine import train
from nnunet_cpr.vision.folder import CHECKPOINT, DYNAMICS, FIGURE, HISTORY, LOCK, RESULT, folder_of
from nnunet_cpr.vision.task import CannotTrain, Diverged, Options, Prepared, Task
from tests.helpers.examples import examples

CPU = Options()


def prepare(options: Options) -> Prepared:
    """A line through noise, with dropout, so that a training draws random numbers of its own."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(48, 6, generator=generator)
    y = (x[:, :3].sum(1) > 0).long()

    def epoch(number: int):
        order = torch.randperm(len(x))
        return ((x[i], y[i]) for i in order.split(12))

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model):
        assert not model.training
        logits = model(x)
        right = (logits.argmax(1) == y).float().mean().item()
        return {"accuracy": 100 * right, "loss": loss(model, (x, y)).item()}

    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
    )
    return Prepared(model, epoch, loss, evaluate)


TASK = Task(
    name="line",
    about="a test",
    prepare=prepare,
    steps=26,
    warmup=4,
    lr={"adam": 1e-2, "sgd": 0.1, "amos": 1e-2},
    settings=("width", "download"),
)
REFUSES = dataclasses.replace(TASK, prepare=lambda options: pytest.fail("trained again"))
NAMES = [
    "AdamCPR_ws9", "AdamCPR_ip2", "SGDCPR_ki0x1p1_ada_std", "AdamW_wd0p1", "SGD", "AMOS_wd0p1",
    "AdamW_adadecay4_wd0p1", "SGD_awd_wd0p1", "AdamW_cosine0p1_wd0p1", "SGD_rescale2",
]  # fmt: skip


class Stopped(Exception):
    pass


def stop_at(step: int):
    def progress(done: int, steps: int, numbers: dict) -> None:
        if done == step:
            raise Stopped

    return progress


def weights(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Where the trained weights of later runs are put."""
    kept: list[dict] = []
    to_the_end = engine._Training.to_the_end

    def keep(self):
        result = to_the_end(self)
        kept.append({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        return result

    monkeypatch.setattr(engine._Training, "to_the_end", keep)
    return kept


@pytest.mark.parametrize("name", NAMES)
def test_stopped_anywhere_a_run_ends_as_if_it_had_not_been(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = weights(monkeypatch)
    whole = train(TASK, parse_run_name(name), tmp_path / "whole", CPU)
    for step in (3, 17):
        with pytest.raises(Stopped):
            train(TASK, parse_run_name(name), tmp_path / "parts", CPU, stop_at(step))
    parts = train(TASK, parse_run_name(name), tmp_path / "parts", CPU)

    def without_time(result: dict) -> dict:
        return {key: value for key, value in result.items() if key != "seconds"}

    assert without_time(parts) == without_time(whole)
    assert str(kept[0]) == str(kept[1])
    for key, value in kept[0]["model"].items():
        assert torch.equal(value, kept[1]["model"][key])
    for file in (HISTORY, DYNAMICS):
        a, b = (folder_of(tmp_path / f, TASK, parse_run_name(name)) / file for f in ("whole", "parts"))
        assert a.read_bytes() == b.read_bytes()


def test_what_a_run_leaves(tmp_path: Path) -> None:
    result = train(TASK, parse_run_name("AdamCPR_ws9_seed2"), tmp_path, CPU)
    folder = tmp_path / "line" / "AdamCPR_ws9_seed2"
    assert {f.name for f in folder.iterdir()} == {HISTORY, DYNAMICS, FIGURE, "result.json", LOCK}
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["step"] == 26 and result["run"] == "AdamCPR_ws9_lr0p01_warmup4_seed2_26steps"
    history = pd.read_csv(folder / HISTORY)
    assert history["step"].tolist() == [4, 8, 12, 16, 20, 24, 26]
    assert history["accuracy"].iloc[-1] == pytest.approx(result["accuracy"])
    dynamics = pd.read_csv(folder / DYNAMICS)
    assert dynamics["step"].unique().tolist() == [0, 4, 8, 12, 16, 20, 24, 26]
    assert set(dynamics["parameter"]) == {"0.weight", "3.weight"}
    assert np.isinf(dynamics.query("step <= 8")["kappa"]).all()
    assert np.isfinite(dynamics.query("step > 9")["kappa"]).all()
    assert (dynamics.query("step > 9")["multiplier"] > 0).any()


def test_the_trained_weights_are_kept_where_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = weights(monkeypatch)
    train(TASK, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, keep_model=True))
    saved = torch.load(folder_of(tmp_path, TASK, parse_run_name("SGD")) / "model.pt", weights_only=True)
    assert all(torch.equal(value, kept[0]["model"][key]) for key, value in saved.items())


def test_without_cpr_the_measure_is_recorded_all_the_same(tmp_path: Path) -> None:
    train(TASK, parse_run_name("AdamW_wd0p1"), tmp_path, CPU)
    dynamics = pd.read_csv(folder_of(tmp_path, TASK, parse_run_name("AdamW_wd0p1")) / DYNAMICS)
    torch.manual_seed(0)
    assert (dynamics["measure"] > 0).all() and dynamics[["kappa", "multiplier"]].isna().all().all()


def test_what_is_done_is_not_trained_again(tmp_path: Path) -> None:
    name = parse_run_name("SGD_4steps_warmup0")
    first = train(TASK, name, tmp_path, CPU)
    assert train(REFUSES, name, tmp_path, CPU) == first


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    train(TASK, parse_run_name("SGD"), tmp_path, CPU)
    longer = dataclasses.replace(TASK, steps=30)
    with pytest.raises(CannotTrain, match=r"is of SGD_.*26steps, not of SGD_.*30steps; use other"):
        train(longer, parse_run_name("SGD"), tmp_path, CPU)
    with pytest.raises(Stopped):
        train(TASK, parse_run_name("SGD_seed2"), tmp_path, CPU, stop_at(6))
    with pytest.raises(CannotTrain, match=f"{CHECKPOINT} is of SGD_"):
        train(longer, parse_run_name("SGD_seed2"), tmp_path, CPU)
    other = dataclasses.replace(CPU, settings={"width": "8"})
    with pytest.raises(CannotTrain, match=r"26steps, not of SGD_.*26steps width=8"):
        train(TASK, parse_run_name("SGD"), tmp_path, other)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    name = parse_run_name("SGD_lr1e30")
    with pytest.raises(Diverged, match=r"was not finite before step .*; try a smaller _lr<V>") as first:
        train(TASK, name, tmp_path, CPU)
    folder = folder_of(tmp_path, TASK, name)
    result = json.loads((folder / RESULT).read_text())
    assert f"before step {result['diverged']};" in str(first.value) and "loss" not in result
    assert not (folder / CHECKPOINT).exists()
    with pytest.raises(Diverged) as again:
        train(REFUSES, name, tmp_path, CPU)
    assert str(again.value) == str(first.value)


@pytest.mark.parametrize("name", ["SGD", "SGD_lr1e30"])
def test_a_run_is_trained_again_where_asked_for(name: str, tmp_path: Path) -> None:
    def attempt(task: Task, options: Options, progress: engine.Progress = lambda *_: None) -> str:
        try:
            return str(train(task, parse_run_name(name), tmp_path, options, progress)["loss"])
        except Diverged as error:
            return str(error)

    first = attempt(TASK, dataclasses.replace(CPU, keep_model=True))
    again = dataclasses.replace(CPU, again=True)
    with pytest.raises(pytest.fail.Exception):  # a task that cannot begin leaves what is there
        attempt(REFUSES, again)
    assert attempt(REFUSES, CPU) == first
    with pytest.raises(Stopped):
        attempt(TASK, again, stop_at(2))
    folder = folder_of(tmp_path, TASK, parse_run_name(name))
    assert {file.name for file in folder.iterdir()} == {LOCK}
    if name == "SGD":
        with pytest.raises(Stopped):
            attempt(TASK, again, stop_at(17))
        steps = []  # what has begun again goes on
        attempt(TASK, again, lambda done, *_: steps.append(done))
        assert steps[0] == 16
    assert attempt(TASK, CPU) == first


def test_a_warm_up_longer_than_the_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongName, match="warm-up of 4 steps is not shorter"):
        train(TASK, parse_run_name("SGD_3steps"), tmp_path, CPU)
    assert not tmp_path.joinpath("line").exists()


def test_batches_in_parts_give_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_dropout(options: Options) -> Prepared:
        prepared = prepare(options)
        prepared.model[2].p = 0.0
        return prepared

    task = dataclasses.replace(TASK, prepare=without_dropout)
    kept = weights(monkeypatch)
    for parts in (1, 5):  # five parts of 12 are of unequal size
        options = dataclasses.replace(CPU, microbatches=parts)
        train(task, parse_run_name("SGD"), tmp_path / str(parts), options)
    for key, value in kept[0]["model"].items():
        torch.testing.assert_close(value, kept[1]["model"][key], rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = weights(monkeypatch)
    tiny = dataclasses.replace(TASK, clip=1e-9)
    train(tiny, parse_run_name("SGD_lr0p1_4steps_warmup0_wd0"), tmp_path, CPU)
    torch.manual_seed(0)
    engine.seed_all(1, 0)
    start = prepare(CPU).model.state_dict()
    for key, value in kept[0]["model"].items():
        torch.testing.assert_close(value, start[key], rtol=0, atol=1e-7)


# Defects that were


@pytest.mark.parametrize("step", [8, 26])
def test_killed_between_checkpoint_and_tables_it_goes_on(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = engine._Record.write

    def killed(record: engine._Record, folder: Path) -> None:
        if record.history[-1]["step"] == step:
            raise Stopped
        write(record, folder)

    whole = train(TASK, parse_run_name("SGD"), tmp_path / "whole", CPU)
    monkeypatch.setattr(engine._Record, "write", killed)
    with pytest.raises(Stopped):
        train(TASK, parse_run_name("SGD"), tmp_path / "parts", CPU)
    monkeypatch.setattr(engine._Record, "write", write)
    assert train(TASK, parse_run_name("SGD"), tmp_path / "parts", CPU)["loss"] == whole["loss"]
    a, b = (folder_of(tmp_path / f, TASK, parse_run_name("SGD")) / HISTORY for f in ("whole", "parts"))
    assert a.read_bytes() == b.read_bytes()


def test_a_setting_without_effect_does_not_part_runs(tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, settings_without_effect=("download",))
    first = train(
        task, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, settings={"download": "yes"})
    )
    assert train(task, parse_run_name("SGD"), tmp_path, CPU) == first


@pytest.mark.parametrize(
    ("known", "message"), [((), "it has none"), (("width", "depth"), "there are width, depth")]
)
def test_a_setting_that_the_task_does_not_know_is_refused(
    known: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    task = dataclasses.replace(TASK, settings=known)
    with pytest.raises(CannotTrain, match=f"^line has no setting 'widht'; {message}$"):
        train(task, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, settings={"widht": "8"}))
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    whole = train(TASK, parse_run_name("SGD"), tmp_path / "whole", CPU)
    room = [17]

    def small(options: Options) -> Prepared:
        prepared = prepare(options)

        def loss(model, batch):
            room[0] -= 1
            if room[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nand so on")
            return prepared.loss(model, batch)

        return dataclasses.replace(prepared, loss=loss)

    task = dataclasses.replace(TASK, prepare=small)
    with pytest.raises(CannotTrain, match=r"^cpu has too little memory .* --microbatches 2; it goes on"):
        train(task, parse_run_name("SGD"), tmp_path / "parts", CPU)
    room[0] = 11  # from the last checkpoint, not from the start
    assert train(task, parse_run_name("SGD"), tmp_path / "parts", CPU)["loss"] == whole["loss"]


# Data


@pytest.fixture
def of_files(tmp_path: Path) -> Task:
    """A task whose data are the files in a folder."""
    for name in ("a", "b"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for number in range(20):
            (tmp_path / "data" / "train" / name / f"{number}.jpg").write_bytes(bytes([number] * 99))
    (tmp_path / "data" / "notes.txt").write_text("of no account")
    return dataclasses.replace(TASK, data_folders=("train",))


def with_data(folder: Path) -> Options:
    return dataclasses.replace(CPU, data=folder)


def one_more_image(folder: Path) -> None:
    (folder / "train" / "a" / "20.jpg").write_bytes(b"more")


def other_names(folder: Path) -> None:
    (folder / "train" / "b").rename(folder / "train" / "c")


def other_pixels(folder: Path) -> None:
    for file in folder.rglob("*.jpg"):
        file.write_bytes(file.read_bytes()[::-1] + b"x")


@pytest.mark.parametrize("change", [one_more_image, other_names, other_pixels])
def test_other_data_is_noticed(change: Callable[[Path], None], of_files: Task, tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    train(of_files, parse_run_name("SGD"), results, with_data(data))
    with pytest.raises(Stopped):
        train(of_files, parse_run_name("SGD_seed2"), results, with_data(data), stop_at(6))
    change(data)
    for name, file in (("SGD", RESULT), ("SGD_seed2", CHECKPOINT)):
        with pytest.raises(
            CannotTrain, match=rf"{file} is of .* data=\d+ files .*; use other --results"
        ):
            train(of_files, parse_run_name(name), results, with_data(data))


def test_data_may_move_and_need_not_be_there_for_what_is_done(of_files: Task, tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    first = train(of_files, parse_run_name("SGD"), results, with_data(data))
    with pytest.raises(Stopped):
        train(of_files, parse_run_name("SGD_seed2"), results, with_data(data), stop_at(6))
    moved = data.rename(tmp_path / "elsewhere")
    (moved / "more.txt").write_text("beside the data")
    (moved / "train" / ".DS_Store").write_text("hidden")
    refuses = dataclasses.replace(REFUSES, data_folders=("train",))
    for options in (with_data(moved), CPU):
        assert train(refuses, parse_run_name("SGD"), results, options) == first
    assert train(of_files, parse_run_name("SGD_seed2"), results, with_data(moved))["step"] == 26


def test_bfloat16_is_another_run(tmp_path: Path) -> None:
    train(TASK, parse_run_name("SGD"), tmp_path, CPU)
    with pytest.raises(CannotTrain, match=r"26steps, not of SGD_.*26steps bf16=yes"):
        train(TASK, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, bf16=True))


def test_a_normalized_batch_is_not_split(tmp_path: Path) -> None:
    def normalized(options: Options) -> Prepared:
        prepared = prepare(options)
        prepared.model.insert(1, torch.nn.BatchNorm1d(16))
        return prepared

    task = dataclasses.replace(TASK, prepare=normalized)
    with pytest.raises(CannotTrain, match="normalizes over the whole batch"):
        train(task, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, microbatches=2))


def test_a_bound_that_comes_too_late_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="regularizes nothing: no bound is set before step 26"):
        train(TASK, parse_run_name("AdamCPR_ws26"), tmp_path, CPU)


def test_a_baseline_that_would_decay_nothing_is_refused() -> None:
    with pytest.raises(WrongName, match="would decay nothing; say one with _wd<V>"):
        TASK.complete(parse_run_name("AdamW_awd"))
    assert TASK.complete(parse_run_name("AdamW_awd_wd0")).weight_decay == 0
    assert TASK.complete(parse_run_name("AdamW_rescale2")).weight_decay is None


@pytest.mark.parametrize(
    "name", ["AdamCPR_ws8_l2_mu1_lr0p01_warmup4_26steps_seed1", "AdamCPR_seed1", "AdamCPR_ws8"]
)
def test_a_run_has_one_folder_however_much_its_name_says(name: str) -> None:
    assert str(TASK.shorten(parse_run_name(name))) == "AdamCPR_seed1"


@pytest.mark.parametrize("file", [CHECKPOINT, "result.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"garbage" * 99])
def test_damaged_files_are_named(file: str, content: bytes, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, TASK, parse_run_name("SGD"))
    folder.mkdir(parents=True)
    (folder / file).write_bytes(content)
    with pytest.raises((CannotTrain, OSError), match=f"{file} is damaged; delete it"):
        train(TASK, parse_run_name("SGD"), tmp_path, CPU)


# The schedule


@examples(50, search=500)
@given(st.integers(1, 500), st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1))
def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine(
    warmup: int, rest: int, first: float, final: float
) -> None:
    total = warmup + rest
    rates = [warmup_cosine(step, warmup, total, first, final) for step in range(total + 1)]
    assert rates[warmup - 1] == pytest.approx(1) and rates[warmup] == pytest.approx(1)
    assert rates[total] == pytest.approx(final, abs=1e-9)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[warmup:]))
    middle = warmup + rest // 2
    if rest % 2 == 0:
        assert rates[middle] == pytest.approx((1 + final) / 2)
    assert math.isclose(rates[0], first + (1 - first) / warmup)


# Names


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_run(family: str) -> None:
    run = TASK.complete(parse_run_name(family))
    assert (run.total_steps, run.warmup_steps, run.seed) == (26, 4, 1)
    assert run.lr == TASK.lr[FAMILIES[family].optimizer]
    assert parse_run_name(str(run)) == run
    assert run.default_warm_start == 8  # twice the warm-up


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Adamcpr_ws9", r"did you mean AdamCPR_ws9\?"),
        ("nonsense", "its name begins with AdamCPR, SGDCPR"),
        ("AdamCPR_100epochs", "unknown suffix _100epochs"),
        ("AdamW_ws100", "use AdamCPR or leave it out"),
        ("SGDCPR_wd0p1", "takes no _wd0p1"),
    ],
)
def test_wrong_names_are_one_line(text: str, message: str) -> None:
    with pytest.raises(WrongName, match=message) as caught:
        parse_run_name(text)
    assert len(str(caught.value).splitlines()) == 1


# Figures


def test_runs_are_drawn_together(tmp_path: Path) -> None:
    folders = {}
    for name in ("AdamCPR_ws9", "AdamW_wd0p1"):
        train(TASK, parse_run_name(name), tmp_path, CPU)
        folders[name] = folder_of(tmp_path, TASK, parse_run_name(name))
    figure = tmp_path / "both.png"
    draw_dynamics(folders, figure, ["3.weight"])
    assert figure.stat().st_size > 10_000
    with pytest.raises(CannotDraw, match=r"no matrix is named 'x'; there are 0\.weight, 3\.weight"):
        draw_dynamics(folders, tmp_path / "none.png", ["x"])
    assert not (tmp_path / "none.png").exists()
