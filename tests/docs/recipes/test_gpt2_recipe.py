"""The recipe for GPT-2 with Hugging Face's Trainer, on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tests.docs.recipes import recipe_runs
from tests.helpers.fused_steps import record_fused_steps
from tests.helpers.resume_cases import assert_regularized, differences

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from nnunet_cpr import AdamCPR  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

STEPS, ACCUMULATE = 12, 2
DECAY = "--optimizer adamw --weight-decay 0.1"


@pytest.fixture
def options(text_folder: Path, tokenizer_folder: Path, dataset_cache: Path) -> list[str]:
    model = "--layers 2 --heads 2 --width 16 --block 16"
    run = f"--steps {STEPS} --batch {4 * ACCUMULATE} --batch-per-device 4 --lr 1e-2"
    every = "--save-every 4 --eval-every 4 --no-bf16"
    data = ["--text", str(text_folder), "--tokenizer", str(tokenizer_folder)]
    return [*model.split(), *run.split(), *every.split(), *data]


@pytest.mark.parametrize(
    "method",
    [
        "--warmup 10 --kappa ws6",  # set after the interruption
        pytest.param(f"{DECAY} --method adadecay4", marks=pytest.mark.slow),
        pytest.param(f"{DECAY} --method amos", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_is_bit_exact(
    method: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train with and without an interruption in step 6."""
    if "amos" in method:
        pytest.importorskip("pytorch_optimizer")
    options = [*options, *method.split()]
    recipe = recipe_runs.load("gpt2_openwebtext")
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    recipe.main([*options, "--out", str(uninterrupted)])
    with monkeypatch.context() as patch:
        recipe_runs.stop_in_call(patch, transformers.Trainer, "training_step", 6 * ACCUMULATE)
        with pytest.raises(recipe_runs.Stopped):
            recipe.main([*options, "--out", str(resumed)])
    assert [path.name for path in resumed.glob("checkpoint-*")] == ["checkpoint-4"]
    recipe.main([*options, "--out", str(resumed)])
    expected = recipe_runs.load_trainer_checkpoint(uninterrupted, STEPS)
    assert differences(recipe_runs.load_trainer_checkpoint(resumed, STEPS), expected) == []
    if "kappa" in method:
        assert_regularized(expected["optimizer"], STEPS)  # optimizer steps, not passes


def test_too_little_text_is_reported_before_training(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_runs.load("gpt2_openwebtext")
    monkeypatch.setattr(transformers.Trainer, "train", lambda *_, **__: pytest.fail("it trains"))
    folder = tmp_path / "few"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text("abc")
    given = ["--text", str(folder), "--block", "256", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="29 of 30 documents have less than one sample") as refusal:
        recipe.main([*options, *given])
    assert "\n" not in refusal.value.code


@pytest.mark.slow
def test_runs_are_compared_in_a_table_and_a_figure(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds with weight decay, one of them resumed, and one run with CPR."""
    recipe = recipe_runs.load("gpt2_openwebtext")
    runs = {"a1": f"{DECAY} --seed 1", "a2": f"{DECAY} --seed 2", "cpr": "--kappa ki0x0.5"}
    options = [*options, "--warmup", "4"]
    words = {name: [*options, *run.split(), "--out", str(tmp_path / name)] for name, run in runs.items()}
    with monkeypatch.context() as patch:
        recipe_runs.stop_in_call(patch, transformers.Trainer, "training_step", 10 * ACCUMULATE)
        with pytest.raises(recipe_runs.Stopped):
            recipe.main(words["a1"])
    taken = record_fused_steps(monkeypatch)
    trained = {name: recipe.main(words[name]) for name in runs}

    compare = recipe_runs.load("compare_runs")
    table = compare.main([*(str(tmp_path / name) for name in runs), "--out", str(tmp_path / "both")])
    losses = {name: trainer.evaluate()["eval_loss"] for name, trainer in trained.items()}
    expected = np.exp([losses["a1"], losses["a2"]])
    decayed, bounded = table.iloc[0], table.iloc[1]
    assert table.index[0] == "optimizer adamw, weight_decay 0.1"
    assert decayed["runs"] == 2
    assert decayed["perplexity"] == pytest.approx(expected.mean(), rel=1e-5)
    assert decayed["perplexity std"] == pytest.approx(expected.std(ddof=1), rel=1e-3)
    assert bounded["perplexity"] == pytest.approx(np.exp(losses["cpr"]), rel=1e-5)
    assert (tmp_path / "both.png").stat().st_size > 10_000

    dynamics = pd.read_csv(tmp_path / "a1" / "dynamics.csv")
    assert dynamics["step"].tolist() == [step for step in (4, 8, 12) for _ in range(8)]
    weights = dict(trained["a1"].model.named_parameters())
    for row in dynamics[dynamics["step"] == STEPS].itertuples():
        assert row.measure == pytest.approx(weights[row.parameter].double().square().mean().item(), 1e-5)
    assert dynamics["kappa"].isna().all()
    bounds = pd.read_csv(tmp_path / "cpr" / "dynamics.csv")
    optimizer = trained["cpr"].optimizer.optimizer
    cpr = optimizer.cpr
    assert isinstance(optimizer, AdamCPR)
    assert taken and all(taken)  # accelerate's wrapper keeps the fused step
    logged = trained["cpr"].state.log_history
    rates = [entry["learning_rate"] for entry in logged if "learning_rate" in entry]
    assert rates[0] > rates[1] > rates[2]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)  # a tenth of the highest
    # Two layers with two matrices each in attention and MLP; no embedding and no tied output layer.
    assert len(cpr.names) == 8
    assert not any("wte" in name or "wpe" in name or "lm_head" in name for name in cpr.names)
    result = (tmp_path / "cpr" / "result.json").read_text()
    assert recipe.main(words["cpr"]) is None  # finished
    assert (tmp_path / "cpr" / "result.json").read_text() == result
    with pytest.raises(SystemExit, match="was trained with batch 8, got 4; choose another --out"):
        recipe.main([*words["cpr"], "--batch", "4"])
    assert bounds["parameter"].tolist()[-8:] == cpr.names
    assert bounds["kappa"].tolist()[-8:] == pytest.approx(cpr.kappa.tolist())
    assert (bounds["multiplier"] > 0).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--weight-decay 0.1", "--weight-decay is for --optimizer adamw"),
        ("--optimizer adamw --method lr1en3", "--method lr1en3: unknown; choose from amos, decoupled"),
        ("--kappa ws", "bound"),
        ("--batch 100", "expected a multiple of 32, the samples of a pass on all devices, got 100"),
        ("--warmup 20 --steps 20", "--warmup: expected less than the 20 steps, got 20"),
    ],
)
def test_wrong_option_of_the_optimizer_is_reported(
    change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        recipe_runs.load("gpt2_openwebtext").main(["--out", "unused", *change.split()])
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not Path("unused").exists()


def test_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match=r"datasets.*; run: pip install 'nnunet-cpr\[language\]'"):
        recipe_runs.load("gpt2_openwebtext").main(["--out", "unused"])


@pytest.mark.parametrize("name", ["gpt2_openwebtext", "lora_finetuning"])
def test_unsuitable_devices_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer would multiply the batch by the number of GPUs."""
    recipe = recipe_runs.load(name)
    required = ["--out", str(tmp_path), *(["--data", __file__] if "lora" in name else [])]
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    settings = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=4)
    assert settings.train_batch_size == 8
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        recipe.main(["--no-bf16", *required])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no GPU with bfloat16 is available; train in float32"):
            recipe.main(required)
