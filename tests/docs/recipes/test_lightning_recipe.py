"""The recipe for Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.recipes import recipe_runs
from tests.helpers.resume_cases import assert_regularized, differences

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


@pytest.mark.slow  # resumes in another process
def test_resumed_run_is_bit_exact(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    recipe_runs.run_in_process("lightning_module", [*options, "--out", str(resumed)])

    rates = [group["lr"] for group in saved(uninterrupted)["optimizer_states"][0]["param_groups"]]
    assert rates == [pytest.approx(1e-3)]  # a tenth of the highest
    expected = saved(uninterrupted)
    assert_regularized(expected["optimizer_states"][0], 5 * EPOCHS)
    assert differences(saved(resumed), expected) == []
