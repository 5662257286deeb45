"""The recipe for GPT-2 with Hugging Face's Trainer, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import recipe_runs

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


@pytest.mark.parametrize(
    "other_process",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["same process", "other process"],
)
def test_resumed_run_is_bit_exact(
    options: list[str], other_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    if other_process:
        recipe_runs.run_in_process("gpt2_openwebtext", [*options, "--out", str(resumed)])
    else:
        recipe.main([*options, "--out", str(resumed)])

    expected = recipe_runs.load_trainer_checkpoint(uninterrupted, STEPS)
    recipe_runs.assert_cpr_is_active(expected["optimizer"], STEPS)  # optimizer steps, not passes
    recipe_runs.assert_same(recipe_runs.load_trainer_checkpoint(resumed, STEPS), expected)


@pytest.mark.parametrize("name", ["gpt2_openwebtext", "lora_finetuning"])
def test_newest_complete_checkpoint_is_resumed(name: str, tmp_path: Path) -> None:
    recipe = recipe_runs.load(name)
    assert recipe.last_checkpoint(tmp_path / "nowhere") is None
    for kept in ("best", "best-20", "²", "16-copy"):
        (tmp_path / f"checkpoint-{kept}").mkdir()
        (tmp_path / f"checkpoint-{kept}" / "trainer_state.json").touch()
    assert recipe.last_checkpoint(tmp_path) is None
    for step in (4, 12, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step < 12:  # the newest is incomplete
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert recipe.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")


@pytest.mark.parametrize(
    ("texts", "block", "message"),
    [
        ([], 16, "no .txt files found"),
        (["abc " * 500], 16, "expected at least 2 documents, .*, got 1"),
        (["abc"] * 30, 256, "to train on: 29 of 30 documents have less than one sample of 256 tokens"),
        (["abc " * 9] * 30, 64, "to hold out: 1 of 30 documents have less than one sample of 64 tokens"),
    ],
    ids=["none", "one", "all short", "the one held out short"],
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
def test_several_gpus_without_torchrun_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer would multiply the batch by the number of GPUs."""
    recipe = recipe_runs.load(name)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    settings = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=4)
    assert settings.train_batch_size == 8
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        recipe.main(["--no-bf16", *required_options(name, tmp_path)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have bfloat16")
@pytest.mark.parametrize("name", ["gpt2_openwebtext", "lora_finetuning"])
def test_missing_bfloat16_names_the_option(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match="no GPU with bfloat16 is available; train in float32 with --no-bf16"
    ):
        recipe_runs.load(name).main(required_options(name, tmp_path))


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

    # A finished training is not repeated.
    before = recipe_runs.load_trainer_checkpoint(tmp_path / "run", STEPS)
    again = recipe.main([*options, "--out", str(tmp_path / "run"), "--warmup", "4", "--warm-start", "3"])
    recipe_runs.assert_same(recipe_runs.load_trainer_checkpoint(tmp_path / "run", STEPS), before)
    assert torch.equal(again.optimizer.optimizer.cpr.kappa, optimizer.cpr.kappa)

    # Other settings of CPR are refused.
    with pytest.raises(ValueError, match="kappa"):
        recipe.main([*options, "--out", str(tmp_path / "run"), "--warmup", "4", "--warm-start", "2"])


def test_sizes_match_the_paper() -> None:
    recipe = recipe_runs.load("gpt2_openwebtext")

    class Tokenizer:
        eos_token_id = 50256

        def __len__(self) -> int:
            return 50257

    for size, batch, millions in (("small", 32, 124), ("medium", 24, 355)):
        args = recipe.parse(["--out", "x", "--size", size])
        assert (args.batch, args.accumulate, args.steps, args.warmup) == (batch, 8, 200_000, 5000)
        with torch.device("meta"):
            model = recipe.new_model(args, Tokenizer())
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize("name", ["gpt2_openwebtext", "lora_finetuning"])
def test_help_does_not_import_torch(name: str) -> None:
    code = """
import runpy, sys
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
except SystemExit as ended:
    assert ended.code == 0
assert not {"torch", "transformers"} & set(sys.modules)
"""
    command = [sys.executable, "-c", code, str(recipe_runs.RECIPES / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--no-bf16" in done.stdout
