"""Training, interrupting, resuming and recording of runs."""

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

from nnunet_cpr.bounds import KappaWS
from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import FAMILIES, parse_run_name
from nnunet_cpr.vision import engine
from nnunet_cpr.vision.cosine_lr import warmup_cosine
from nnunet_cpr.vision.dynamics_figure import draw_dynamics
from nnunet_cpr.vision.engine import train
from nnunet_cpr.vision.folder import CHECKPOINT, DYNAMICS, FIGURE, HISTORY, LOCK, RESULT, run_folder
from nnunet_cpr.vision.task import CannotDraw, CannotTrain, Diverged, Options, Setup, Task
from tests.helpers.examples import examples

CPU = Options()


def build_setup(options: Options) -> Setup:
    """Linear separation of noise, with dropout, so that the training draws random numbers."""
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
        *(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.ReLU()),
        *(torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)),
    )
    return Setup(model, epoch, loss, evaluate)


TASK = Task(
    name="line",
    about="a test",
    setup=build_setup,
    steps=26,
    warmup=4,
    lr={"adam": 1e-2, "sgd": 0.1, "muon": 1e-2, "amos": 1e-2},
    settings=("width", "download"),
)
REFUSES = dataclasses.replace(TASK, setup=lambda options: pytest.fail("trained again"))
NAMES = [
    "AdamCPR_ws9", "AdamCPR_ip2", "SGDCPR_ki0x1p1_ada_std", "AdamW_wd0p1", "SGD", "AMOS_wd0p1",
    "AdamW_adadecay4_wd0p1", "SGD_awd_wd0p1", "AdamW_cosine0p1_wd0p1", "SGD_rescale2",
    "MuonCPR_ws9", "Muon_decoupled_wd0p1",
    "AdamCPR_ws20p", "AdamW_cautious_wd0p1", "SGD_independent_wd0p01", "AdamW_normws5_wd1",
    "SGD_hyperball",
]  # fmt: skip


class Stopped(Exception):
    pass


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the figure, which takes most of the time of a short run."""
    monkeypatch.setattr(engine, "draw_dynamics", lambda runs, path: path.touch())


def stop_at(step: int):
    def progress(done: int, total: int) -> None:
        if done == step:
            raise Stopped

    return progress


def collect_weights(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Return a list that collects the trained weights of later runs."""
    kept: list[dict] = []
    loop_train = engine._TrainingLoop.train

    def keep(self):
        result = loop_train(self)
        kept.append({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        return result

    monkeypatch.setattr(engine._TrainingLoop, "train", keep)
    return kept


@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_equals_uninterrupted_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = collect_weights(monkeypatch)
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
        a, b = (run_folder(tmp_path / f, TASK, parse_run_name(name)) / file for f in ("whole", "parts"))
        assert a.read_bytes() == b.read_bytes()


def test_run_writes_its_files(tmp_path: Path) -> None:
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
    assert set(dynamics["parameter"]) == {"0.weight", "2.weight", "5.weight"}
    assert np.isinf(dynamics.query("step <= 8")["kappa"]).all()
    assert np.isfinite(dynamics.query("step > 9")["kappa"]).all()
    assert (dynamics.query("step > 9")["multiplier"] > 0).any()


def test_keep_model_saves_trained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = collect_weights(monkeypatch)
    train(TASK, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, keep_model=True))
    saved = torch.load(run_folder(tmp_path, TASK, parse_run_name("SGD")) / "model.pt", weights_only=True)
    assert all(torch.equal(value, kept[0]["model"][key]) for key, value in saved.items())


def test_run_without_cpr_records_l2_values(tmp_path: Path) -> None:
    train(TASK, parse_run_name("AdamW_wd0p1"), tmp_path, CPU)
    dynamics = pd.read_csv(run_folder(tmp_path, TASK, parse_run_name("AdamW_wd0p1")) / DYNAMICS)
    torch.manual_seed(0)
    assert (dynamics["measure"] > 0).all() and dynamics[["kappa", "multiplier"]].isna().all().all()


def test_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    name = parse_run_name("SGD_4steps_warmup0")
    first = train(TASK, name, tmp_path, CPU)
    assert train(REFUSES, name, tmp_path, CPU) == first


@pytest.mark.parametrize(("name", "same"), [("AdamCPR", "AdamCPR_ws8"), ("AdamCPR_mu1_l2", "AdamCPR")])
def test_other_spelling_of_a_finished_run_is_not_trained(name: str, same: str, tmp_path: Path) -> None:
    first = train(TASK, parse_run_name(name), tmp_path, CPU)
    assert train(REFUSES, parse_run_name(same), tmp_path, CPU) == first


def test_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    train(TASK, parse_run_name("SGD"), tmp_path, CPU)
    longer = dataclasses.replace(TASK, steps=30)
    with pytest.raises(CannotTrain, match=r"expected SGD_.*30steps, got SGD_.*26steps; use other"):
        train(longer, parse_run_name("SGD"), tmp_path, CPU)
    with pytest.raises(Stopped):
        train(TASK, parse_run_name("SGD_seed2"), tmp_path, CPU, stop_at(6))
    with pytest.raises(CannotTrain, match=f"{CHECKPOINT}: expected SGD_.*30steps, got SGD_.*26steps"):
        train(longer, parse_run_name("SGD_seed2"), tmp_path, CPU)
    other = dataclasses.replace(CPU, settings={"width": "8"})
    with pytest.raises(CannotTrain, match=r"expected SGD_.*26steps width=8, got SGD_.*26steps; use"):
        train(TASK, parse_run_name("SGD"), tmp_path, other)


def test_non_finite_loss_ends_the_run(tmp_path: Path) -> None:
    name = parse_run_name("SGD_lr1e30")
    with pytest.raises(Diverged, match=r"is not finite before step .*; use a smaller _lr<V>") as first:
        train(TASK, name, tmp_path, CPU)
    folder = run_folder(tmp_path, TASK, name)
    result = json.loads((folder / RESULT).read_text())
    assert f"before step {result['diverged']};" in str(first.value) and "loss" not in result
    assert not (folder / CHECKPOINT).exists()
    with pytest.raises(Diverged) as again:
        train(REFUSES, name, tmp_path, CPU)
    assert str(again.value) == str(first.value)


@pytest.mark.parametrize("name", ["SGD", "SGD_lr1e30"])
def test_again_trains_a_finished_run(name: str, tmp_path: Path) -> None:
    def attempt(task: Task, options: Options, progress: engine.Progress = lambda *_: None) -> str:
        try:
            return str(train(task, parse_run_name(name), tmp_path, options, progress)["loss"])
        except Diverged as error:
            return str(error)

    first = attempt(TASK, dataclasses.replace(CPU, keep_model=True))
    again = dataclasses.replace(CPU, again=True)
    with pytest.raises(pytest.fail.Exception):  # a task that cannot start keeps the old files
        attempt(REFUSES, again)
    assert attempt(REFUSES, CPU) == first
    with pytest.raises(Stopped):
        attempt(TASK, again, stop_at(2))
    folder = run_folder(tmp_path, TASK, parse_run_name(name))
    assert {file.name for file in folder.iterdir()} == {LOCK}
    if name == "SGD":
        with pytest.raises(Stopped):
            attempt(TASK, again, stop_at(17))
        steps = []  # the second training resumes
        attempt(TASK, again, lambda done, total: steps.append(done))
        assert steps[0] == 16
    assert attempt(TASK, CPU) == first


def test_warm_up_longer_than_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongName, match="warm-up of 4 steps is not shorter"):
        train(TASK, parse_run_name("SGD_3steps"), tmp_path, CPU)
    assert not tmp_path.joinpath("line").exists()


def test_microbatches_give_the_same_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_dropout(options: Options) -> Setup:
        setup = build_setup(options)
        setup.model[2].p = 0.0
        return setup

    task = dataclasses.replace(TASK, setup=without_dropout)
    kept = collect_weights(monkeypatch)
    for parts in (1, 5):  # 12 samples in five parts of unequal size
        options = dataclasses.replace(CPU, microbatches=parts)
        train(task, parse_run_name("SGD"), tmp_path / str(parts), options)
    for key, value in kept[0]["model"].items():
        torch.testing.assert_close(value, kept[1]["model"][key], rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = collect_weights(monkeypatch)
    tiny = dataclasses.replace(TASK, clip=1e-9)
    train(tiny, parse_run_name("SGD_lr0p1_4steps_warmup0_wd0"), tmp_path, CPU)
    torch.manual_seed(0)
    engine.seed_all(1, 0)
    start = build_setup(CPU).model.state_dict()
    for key, value in kept[0]["model"].items():
        torch.testing.assert_close(value, start[key], rtol=0, atol=1e-7)


# Regressions


@pytest.mark.parametrize("step", [8, 26])
def test_run_killed_between_checkpoint_and_tables_resumes(
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
    a, b = (run_folder(tmp_path / f, TASK, parse_run_name("SGD")) / HISTORY for f in ("whole", "parts"))
    assert a.read_bytes() == b.read_bytes()


def test_setting_without_effect_is_the_same_run(tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, settings_without_effect=("download",))
    first = train(
        task, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, settings={"download": "yes"})
    )
    assert train(task, parse_run_name("SGD"), tmp_path, CPU) == first


@pytest.mark.parametrize(
    ("known", "message"), [((), "it has no settings"), (("width", "depth"), "choose from width, depth")]
)
def test_unknown_setting_is_refused(known: tuple[str, ...], message: str, tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, settings=known)
    with pytest.raises(CannotTrain, match=f"^--set widht: unknown setting of line; {message}$"):
        train(task, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, settings={"widht": "8"}))
    assert not list(tmp_path.iterdir())


def test_run_resumes_after_out_of_memory(tmp_path: Path) -> None:
    whole = train(TASK, parse_run_name("SGD"), tmp_path / "whole", CPU)
    room = [17]

    def small(options: Options) -> Setup:
        setup = build_setup(options)

        def loss(model, batch):
            room[0] -= 1
            if room[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nand so on")
            return setup.loss(model, batch)

        return dataclasses.replace(setup, loss=loss)

    task = dataclasses.replace(TASK, setup=small)
    with pytest.raises(CannotTrain, match=r"^cpu is out of memory .* --microbatches 2 to resume"):
        train(task, parse_run_name("SGD"), tmp_path / "parts", CPU)
    room[0] = 11  # enough from the last checkpoint, not from the start
    assert train(task, parse_run_name("SGD"), tmp_path / "parts", CPU)["loss"] == whole["loss"]


# Data


@pytest.fixture
def file_task(tmp_path: Path) -> Task:
    """Return a task whose data are the files in a folder."""
    for name in ("a", "b"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for number in range(20):
            (tmp_path / "data" / "train" / name / f"{number}.jpg").write_bytes(bytes([number] * 99))
    (tmp_path / "data" / "notes.txt").write_text("ignored")
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
def test_other_data_is_refused(change: Callable[[Path], None], file_task: Task, tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    train(file_task, parse_run_name("SGD"), results, with_data(data))
    with pytest.raises(Stopped):
        train(file_task, parse_run_name("SGD_seed2"), results, with_data(data), stop_at(6))
    change(data)
    for name, file in (("SGD", RESULT), ("SGD_seed2", CHECKPOINT)):
        with pytest.raises(
            CannotTrain, match=rf"{file}: expected .*, got .* data=\d+ files .*; use other --results"
        ):
            train(file_task, parse_run_name(name), results, with_data(data))


def test_data_may_move_or_be_missing_for_finished_runs(file_task: Task, tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    first = train(file_task, parse_run_name("SGD"), results, with_data(data))
    with pytest.raises(Stopped):
        train(file_task, parse_run_name("SGD_seed2"), results, with_data(data), stop_at(6))
    moved = data.rename(tmp_path / "elsewhere")
    (moved / "more.txt").write_text("beside the data")
    (moved / "train" / ".DS_Store").write_text("hidden")
    refuses = dataclasses.replace(REFUSES, data_folders=("train",))
    for options in (with_data(moved), CPU):
        assert train(refuses, parse_run_name("SGD"), results, options) == first
    assert train(file_task, parse_run_name("SGD_seed2"), results, with_data(moved))["step"] == 26


def test_bf16_is_another_setting(tmp_path: Path) -> None:
    train(TASK, parse_run_name("SGD"), tmp_path, CPU)
    with pytest.raises(CannotTrain, match=r"expected SGD_.*26steps bf16=yes, got SGD_.*26steps; use"):
        train(TASK, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, bf16=True))


def test_microbatches_are_refused_with_batch_norm(tmp_path: Path) -> None:
    def normalized(options: Options) -> Setup:
        setup = build_setup(options)
        setup.model.insert(1, torch.nn.BatchNorm1d(16))
        return setup

    task = dataclasses.replace(TASK, setup=normalized)
    with pytest.raises(CannotTrain, match="has batch normalization"):
        train(task, parse_run_name("SGD"), tmp_path, dataclasses.replace(CPU, microbatches=2))


def test_bound_after_the_last_step_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="regularizes nothing: no bound is set before step 26"):
        train(TASK, parse_run_name("AdamCPR_ws26"), tmp_path, CPU)


def test_comparison_method_without_weight_decay_is_refused() -> None:
    with pytest.raises(WrongName, match="there is none to adapt; add _wd<V>"):
        TASK.complete(parse_run_name("AdamW_awd"))
    assert TASK.complete(parse_run_name("AdamW_awd_wd0")).weight_decay == 0
    assert TASK.complete(parse_run_name("AdamW_rescale2")).weight_decay is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AdamCPR_ws8_l2_mu1_lr0p01_warmup4_26steps_seed1", "AdamCPR_seed1"),
        ("AdamCPR_seed1", "AdamCPR_seed1"),
        ("AdamCPR_ws8", "AdamCPR_seed1"),
        ("AdamCPR_ws50p", "AdamCPR_ws13_seed1"),
        ("SGD_momentum0p9", "SGD_seed1"),
        ("MuonCPR_momentum0p95", "MuonCPR_seed1"),
    ],
)
def test_run_has_one_folder_for_every_spelling(name: str, expected: str) -> None:
    assert str(TASK.shorten(parse_run_name(name))) == expected


@pytest.mark.parametrize("file", [CHECKPOINT, "result.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"garbage" * 99])
def test_damaged_file_is_named(file: str, content: bytes, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, TASK, parse_run_name("SGD"))
    folder.mkdir(parents=True)
    (folder / file).write_bytes(content)
    with pytest.raises((CannotTrain, OSError), match=f"{file} is damaged; delete it to train"):
        train(TASK, parse_run_name("SGD"), tmp_path, CPU)


# The schedule


@examples(50, search=500)
@given(st.integers(1, 500), st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1))
def test_learning_rate_rises_linearly_then_follows_cosine(
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
def test_every_family_completes(family: str) -> None:
    run = TASK.complete(parse_run_name(family))
    assert (run.total_steps, run.warmup_steps, run.seed) == (26, 4, 1)
    assert run.lr == TASK.lr[FAMILIES[family].optimizer]
    assert parse_run_name(str(run)) == run
    assert run.bound == KappaWS(8)  # twice the warm-up


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
def test_wrong_name_is_one_line(text: str, message: str) -> None:
    with pytest.raises(WrongName, match=message) as caught:
        parse_run_name(text)
    assert len(str(caught.value).splitlines()) == 1


# Figures


def test_dynamics_of_two_runs_are_drawn(tmp_path: Path) -> None:
    folders = {}
    for name in ("AdamCPR_ws9", "AdamW_wd0p1"):
        train(TASK, parse_run_name(name), tmp_path, CPU)
        folders[name] = run_folder(tmp_path, TASK, parse_run_name(name))
    figure = tmp_path / "both.png"
    draw_dynamics(folders, figure, ["5.weight"])
    assert figure.stat().st_size > 10_000
    with pytest.raises(CannotDraw, match=r"unknown parameter 'x'; choose from 0\.weight, 2\.weight"):
        draw_dynamics(folders, tmp_path / "none.png", ["x"])
    assert not (tmp_path / "none.png").exists()
