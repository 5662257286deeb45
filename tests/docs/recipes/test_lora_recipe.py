"""The recipe for LoRA fine-tuning, on a tiny Mistral."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.recipes import recipe_runs
from tests.helpers.fused_steps import record_fused_steps
from tests.helpers.resume_cases import assert_regularized, differences

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


@pytest.fixture
def options(tokenizer_folder: Path, dataset_cache: Path, tmp_path: Path) -> list[str]:
    """Return options for ten steps of four pairs, with one pair too long and a random base model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    base = transformers.MistralForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    pairs = [{"prompt": "abc " * (i % 5 + 1), "answer": "yes" if i % 2 else "no"} for i in range(40)]
    pairs.append({"prompt": "abcdefghij " * 100, "answer": "no"})
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run = "--rank 4 --batch 4 --batch-per-device 2 --max-length 64 --save-every 4"
    schedule = "--lr 1e-2 --warmup 2 --kappa ws4 --no-bf16"
    return ["--data", str(data), "--model", str(tmp_path / "base"), *run.split(), *schedule.split()]


@pytest.mark.slow
def test_resumed_run_is_bit_exact(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = recipe_runs.load("lora_finetuning")
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    taken = record_fused_steps(monkeypatch)
    trainer = recipe.main([*options, "--out", str(uninterrupted)])
    assert "40 pairs, 1 longer ones left out" in capsys.readouterr().out

    cpr = trainer.optimizer.optimizer.cpr
    assert len(cpr.names) == 2 * 2 * len(recipe.PROJECTIONS)  # two layers, A and B of each
    assert all(".lora_A." in name or ".lora_B." in name for name in cpr.names)
    # B starts at 0 and still gets a bound.
    assert bool((cpr.kappa > 0).all() and cpr.kappa.isfinite().all())
    assert taken and all(taken)  # the frozen weights do not prevent the fused step
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    now = trainer.model.get_base_model().state_dict()
    for name, weight in base.items():
        there = name if name in now else name.replace(".weight", ".base_layer.weight")
        assert torch.equal(now[there], weight), name

    with monkeypatch.context() as patch:
        recipe_runs.stop_in_call(patch, transformers.Trainer, "training_step", 2 * 6)
        with pytest.raises(recipe_runs.Stopped):
            recipe.main([*options, "--out", str(resumed)])
    recipe.main([*options, "--out", str(resumed)])

    expected = recipe_runs.load_trainer_checkpoint(uninterrupted, 10)
    assert_regularized(expected["optimizer"], 10)
    assert differences(recipe_runs.load_trainer_checkpoint(resumed, 10), expected) == []
    assert (resumed / "adapter_model.safetensors").exists()


def test_accuracy_without_a_value_before_is_empty(tmp_path: Path) -> None:
    """Tasks measured one after the other are all read; a mean over fewer runs would mislead."""
    compare = recipe_runs.load("compare_runs")
    measured = {"before": [("a", 0.5)], "run1": [("a", 0.6), ("b", 0.7)], "run2": [("a", 0.8)]}
    for name, tasks in measured.items():
        (tmp_path / name / "accuracy").mkdir(parents=True)
        settings = {"lr": 0.1, "seed": int(name[3:])} if name != "before" else {}
        (tmp_path / name / "settings.json").write_text(json.dumps(settings))
        for task, value in tasks:
            results = {"results": {task: {"acc,none": value}}}
            (tmp_path / name / "accuracy" / f"results_{task}.json").write_text(json.dumps(results))
    words = [str(tmp_path / name) for name in ("run1", "run2")]
    table = compare.main([*words, "--before", str(tmp_path / "before"), "--out", str(tmp_path / "x0.1")])
    assert table["a"].item() == pytest.approx(20) and list(table) == ["runs", "a", "a std"]
    table = compare.main([*words, "--out", str(tmp_path / "x0.1")])
    assert table["a"].item() == pytest.approx(70) and table["b"].isna().item()
    assert (tmp_path / "x0.1.csv").exists()


TASK = """\
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_target: answer
doc_to_choice: [" a", " b"]
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def less_likely(prompt: str, answers: list[str], model: Path) -> str:
    """Return the less likely answer; the tokenizer, and with it the answer, varies between sessions."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model)

    def loss(answer: str) -> float:
        tokens = tokenizer(prompt + answer, return_tensors="pt")["input_ids"]
        return network(tokens, labels=tokens).loss.item() * (tokens.numel() - 1)

    return max(answers, key=loss)


@pytest.mark.slow  # starts lm_eval twice
def test_lm_eval_measures_the_change_of_accuracy(options: list[str], tmp_path: Path) -> None:
    """The pairs themselves are the task; their answer is the one that the model does not give before."""
    pytest.importorskip("lm_eval")
    recipe = recipe_runs.load("lora_finetuning")
    run, before = tmp_path / "run", tmp_path / "before"
    options = [option for option in options if option not in ("--kappa", "ws4")]
    labels = [{"prompt": "abc", "answer": less_likely("abc", [" a", " b"], tmp_path / "base")}] * 40
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in labels))
    decay = ["--optimizer", "adamw", "--weight-decay", "0.1", "--lr", "0.1", "--epochs", "5"]
    recipe.main([*options, *decay, "--out", str(run)])
    (tmp_path / "task.yaml").write_text(TASK.format(file=tmp_path / "pairs.jsonl"))
    for folder, adapter in ((before, ""), (run, f",peft={run}")):
        measured = f"--tasks letters --include_path {tmp_path} --output_path {folder}/accuracy"
        model = f"--model hf --model_args pretrained={tmp_path / 'base'}{adapter}"
        command = f"{sys.executable} -m lm_eval run {model} {measured} --device cpu --batch_size 8"
        done = subprocess.run(command.split(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    compare = recipe_runs.load("compare_runs")
    files = ["--out", str(tmp_path / "table")]
    after = compare.main([str(run), *files])["letters"].item()
    change = compare.main([str(run), "--before", str(before), *files])["letters"].item()
    assert after == 100.0
    assert change == after - compare.read_accuracy(before)["letters"] == 100.0
