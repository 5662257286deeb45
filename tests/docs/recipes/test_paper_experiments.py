"""Commands of docs/reference/paper-experiments.md, on tiny models and made data."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from nnunet_cpr import vision
from nnunet_cpr.names.run_name import RunName, parse_run_name
from nnunet_cpr.vision.tasks import cifar100
from tests.docs.recipes import recipe_runs
from tests.helpers import ROOT

pytest.importorskip("torchvision")
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

PAGE = ROOT / "docs/reference/paper-experiments.md"
SECTIONS = dict(re.findall(r"^## (.*?)(?: \{.*?\})?\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))
SWEEPS = sorted((recipe_runs.RECIPES / "cifar100").glob("*.yaml"))


def command_lines(section: str) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", SECTIONS[section], re.S)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_gpt2_commands_train_and_are_compared(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset_cache: Path
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    tiny = "--size tiny --layers 1 --width 16 --block 32 --steps 10 --eval-every 5 --save-every 5"
    small = f"{tiny} --tokenizer bytes --no-bf16 --text {text_folder}".split()
    *runs, comparison, _ = command_lines("GPT-2 on OpenWebText")
    for words in runs:
        recipe_runs.load("gpt2_openwebtext").main([*words[2:], *small])
    table = recipe_runs.load("compare_runs").main(comparison[2:])
    assert table["perplexity"].gt(1).all() and len(table) == 2
    assert Path("gpt2.csv").exists() and Path("gpt2.png").exists()


def test_gpt2_options_of_the_table_are_accepted() -> None:
    """Each word in backticks that follows an option replaces its value."""
    rows = re.findall(r"^\| (?:Figure|Table).*", SECTIONS["GPT-2 on OpenWebText"], re.M)
    parse = recipe_runs.load("gpt2_openwebtext").parse
    accepted = 0
    for row in rows:
        given = ""
        for option in re.findall(r"`([^`]+)`", row):
            if option.startswith("--matrices") or option.endswith(".py"):
                continue
            if option.startswith("--") and " " in option:
                given = option
            elif not option.startswith("--"):
                given = f"{given.rpartition(' ')[0]} {option}"
            else:  # an option whose value the reader chooses
                continue
            weights = "--optimizer adamw " if "--weight-decay" in given else ""
            parse(["--out", "unused", *f"{weights}{given}".split()])
            accepted += 1
    assert accepted == 19


def test_lora_command_is_accepted(tmp_path: Path) -> None:
    words = command_lines("LoRA fine-tuning of Mistral 7B")[2]
    args = recipe_runs.load("lora_finetuning").parse(words[2:])
    assert args.kappa == "ws100" and args.data == "pubmedqa"


def test_page_names_every_sweep() -> None:
    named = re.findall(r"\[`(\w+\.yaml)`\]\(#cifar-100\)", PAGE.read_text())
    assert sorted(named) == [file.name for file in SWEEPS]
    for file in SWEEPS:
        (figure,) = re.findall(r"^# (Figure \S+):", file.read_text())
        assert re.search(rf"^\| {figure} \|.*`{file.name}`", PAGE.read_text(), re.M)


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_sweep_trains(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete all names, and train two steps of the last one on made images and a thin network."""
    monkeypatch.setattr(cifar100, "_network", thin_network)
    monkeypatch.setattr(cifar100, "_images", made_images)
    sweep, task = vision.load_sweep(file), vision.find_task("cifar100")
    runs = sweep.runs()
    assert [task.complete(run).training.steps for run in runs] == [20_000] * len(runs)
    short: RunName = parse_run_name(f"{re.sub('_warmup[0-9]+', '', str(runs[-1]))}_warmup1_2steps")
    result = vision.train(task, short, tmp_path / "results", tmp_path)
    assert result["step"] == 2


def thin_network() -> torch.nn.Module:
    convolution = torch.nn.Conv2d(3, 4, 3, stride=4)
    return torch.nn.Sequential(convolution, torch.nn.Flatten(), torch.nn.Linear(256, 100))


def made_images(folder: Path, train: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(256, (300, 32, 32, 3), dtype=torch.uint8), torch.randint(100, (300,))
