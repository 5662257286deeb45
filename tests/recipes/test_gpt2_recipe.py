"""The recipe for GPT-2 with Hugging Face's Trainer, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.client_training import assert_regularized, assert_same
from tests.recipes import recipe_runs

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from nnunet_cpr import AdamCPR  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

STEPS, ACCUMULATE = 12, 2


@pytest.fixture
def options(text_folder: Path, tokenizer_folder: Path, dataset_cache: Path) -> list[str]:
    model = "--layers 2 --heads 2 --width 16 --block 16"
    run = f"--steps {STEPS} --batch 4 --accumulate {ACCUMULATE} --save-every 4 --no-bf16 --lr 1e-2"
    data = ["--text", str(text_folder), "--tokenizer", str(tokenizer_folder)]
    return [*model.split(), *run.split(), *data]


def test_resumed_run_is_bit_exact(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_runs.load("gpt2_openwebtext")
    options = [*options, "--warmup", "10"]  # Kappa-IP with interval 1
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    recipe.main([*options, "--out", str(uninterrupted)])

    with monkeypatch.context() as patch:
        recipe_runs.stop_in_call(patch, transformers.Trainer, "training_step", 6 * ACCUMULATE)
        with pytest.raises(recipe_runs.Stopped):
            recipe.main([*options, "--out", str(resumed)])
    assert [path.name for path in resumed.glob("checkpoint-*")] == ["checkpoint-4"]
    recipe.main([*options, "--out", str(resumed)])

    expected = recipe_runs.load_trainer_checkpoint(uninterrupted, STEPS)
    assert_regularized(expected["optimizer"], STEPS)  # optimizer steps, not passes
    assert_same(recipe_runs.load_trainer_checkpoint(resumed, STEPS), expected)


@pytest.mark.parametrize(
    ("texts", "block", "message"),
    [
        ([], 16, "no .txt files found"),
        (["abc"] * 30, 256, "to train on: 29 of 30 documents have less than one sample of 256 tokens"),
    ],
    ids=["none", "all short"],
)
def test_too_little_text_is_reported_before_training(
    options: list[str],
    texts: list[str],
    block: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = recipe_runs.load("gpt2_openwebtext")
    monkeypatch.setattr(transformers.Trainer, "train", lambda *_, **__: pytest.fail("it trains"))
    folder = tmp_path / "few"
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    given = ["--text", str(folder), "--block", str(block), "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match=message) as refusal:
        recipe.main([*options, *given])
    assert "\n" not in refusal.value.code


def required_options(name: str, folder: Path) -> list[str]:
    return ["--out", str(folder), *(["--data", __file__] if "lora" in name else [])]


@pytest.mark.parametrize("name", ["gpt2_openwebtext", "lora_finetuning"])
def test_unsuitable_devices_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer would multiply the batch by the number of GPUs."""
    recipe = recipe_runs.load(name)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    settings = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=4)
    assert settings.train_batch_size == 8
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        recipe.main(["--no-bf16", *required_options(name, tmp_path)])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no GPU with bfloat16 is available; train in float32"):
            recipe.main(required_options(name, tmp_path))


def test_trainer_keeps_names_schedule_and_fused_step(options: list[str], tmp_path: Path) -> None:
    recipe = recipe_runs.load("gpt2_openwebtext")
    trainer = recipe.main(
        [*options, "--out", str(tmp_path / "run"), "--warmup", "4", "--warm-start", "3"]
    )
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, AdamCPR)
    assert optimizer._backend is not None  # accelerate's wrapper keeps the fused step
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[0] > rates[1] > rates[2]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)  # a tenth of the highest
    # Two layers with two matrices each in attention and MLP; no embedding and no tied output layer.
    assert len(optimizer.cpr.names) == 8
    assert not any("wte" in name or "wpe" in name or "lm_head" in name for name in optimizer.cpr.names)

    # Other settings of CPR are refused.
    with pytest.raises(ValueError, match="kappa"):
        recipe.main([*options, "--out", str(tmp_path / "run"), "--warmup", "4", "--warm-start", "2"])
