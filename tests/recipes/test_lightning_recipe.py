"""The recipe for Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import recipe_runs

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:lightning", "ignore::UserWarning:lightning"
)

EPOCHS = 4


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Return options for four epochs of five steps each."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 14)
    model = "--width 32 --layers 1 --length 32 --batch 4 --warmup 3 --lr 1e-2"
    return ["--text", str(text), "--epochs", str(EPOCHS), *model.split()]


def saved(folder: Path) -> dict[str, Any]:
    last = torch.load(folder / "last.ckpt", weights_only=True)
    return {key: last[key] for key in ("epoch", "state_dict", "optimizer_states", "lr_schedulers")}


@pytest.mark.parametrize(
    "other_process",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["same process", "other process"],
)
def test_resumed_run_is_bit_exact(
    options: list[str], other_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_runs.load("lightning_module")
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    trainer = recipe.main([*options, "--out", str(uninterrupted)])
    assert trainer.global_step == 5 * EPOCHS
    # CPR logs its metrics and regularizes the five of seven matrices that are no embeddings.
    assert trainer.callback_metrics["cpr/bounded"] == 1
    assert len(trainer.optimizers[0].cpr.names) == 5

    with monkeypatch.context() as patch:
        recipe_runs.stop_in_call(patch, recipe.ByteModel, "training_step", 5 * 2 + 3)
        with pytest.raises(recipe_runs.Stopped):
            recipe.main([*options, "--out", str(resumed)])
    assert saved(resumed)["epoch"] == 1
    if other_process:
        recipe_runs.run_in_process("lightning_module", [*options, "--out", str(resumed)])
    else:
        recipe.main([*options, "--out", str(resumed)])

    rates = [group["lr"] for group in saved(uninterrupted)["optimizer_states"][0]["param_groups"]]
    assert rates == [pytest.approx(1e-3)]  # a tenth of the highest
    expected = saved(uninterrupted)
    recipe_runs.assert_cpr_is_active(expected["optimizer_states"][0], 5 * EPOCHS)
    recipe_runs.assert_same(saved(resumed), expected)


def test_training_without_warm_up(options: list[str], tmp_path: Path) -> None:
    recipe = recipe_runs.load("lightning_module")
    rates: list[float] = []
    original = recipe.ByteModel.training_step

    def record_rate(self: Any, *args: Any) -> torch.Tensor:
        rates.append(self.optimizers().param_groups[0]["lr"])
        return original(self, *args)

    recipe.ByteModel.training_step = record_rate
    trainer = recipe.main([*options, "--warmup", "0", "--out", str(tmp_path / "run")])
    assert rates[0] == 1e-2 and rates == sorted(rates, reverse=True) and len(set(rates)) == 5 * EPOCHS
    recipe_runs.assert_cpr_is_active(saved(tmp_path / "run")["optimizer_states"][0], 5 * EPOCHS)
    assert trainer.callback_metrics["cpr/bounded"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--text", "{folder}/empty.txt"], "empty.txt: expected at least 33 bytes, got 0"),
        (["--length", "630"], "expected at least 631 bytes, got 630; use a smaller --length"),
        (["--text", "{folder}/none.txt"], "No such file or directory"),
        (["--text", "{folder}"], "Is a directory"),
        (["--warmup", "-1"], "--warmup: expected 0 or more steps, got -1"),
    ],
    ids=["empty", "one byte short", "missing", "folder", "negative warm-up"],
)
def test_wrong_option_is_one_line(
    options: list[str],
    change: list[str],
    message: str,
    tmp_path: Path,
) -> None:
    recipe = recipe_runs.load("lightning_module")
    (tmp_path / "empty.txt").touch()
    change = [word.format(folder=tmp_path) for word in change]
    with pytest.raises(SystemExit, match=message) as refusal:
        recipe.main([*options, *change, "--out", str(tmp_path / "run")])
    assert "\n" not in refusal.value.code
    assert not (tmp_path / "run").exists()


def test_one_sample_trains(options: list[str], tmp_path: Path) -> None:
    recipe = recipe_runs.load("lightning_module")
    trainer = recipe.main([*options, "--length", "629", "--epochs", "1", "--out", str(tmp_path / "run")])
    assert trainer.global_step == 1
