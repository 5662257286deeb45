"""Every ``vision run`` command of the docs, on a few images in the layout of its data set."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from tests.helpers.tiny_data import write_cifar100, write_corrupted, write_imagenet

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = sorted(
    {
        line.strip()
        for page in DOCS.glob("reference/vision/*.md")
        for line in page.read_text().splitlines()
        if line.strip().startswith("nnunet-cpr vision run ")
    }
)
SMALL = ("model=test_vit", "image_size=32", "batch=2", "pretrained=no")


def test_docs_show_every_task_of_the_paper() -> None:
    shown = {shlex.split(command)[3] for command in COMMANDS}
    assert shown == {"cifar100", "cifar100-c", "deit-small", "deit-base", "clip-vit-b32"}


@pytest.mark.filterwarnings("ignore:.* regularizes nothing:UserWarning")  # after two steps
@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_trains(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    arguments = shlex.split(command)[1:]
    task, name = arguments[2:4]
    if task.startswith("cifar100"):
        write_cifar100(data, monkeypatch)
        write_corrupted(data / "CIFAR-100-C")
    else:
        write_imagenet(data)
        arguments += [word for setting in SMALL for word in ("--set", setting)]
    arguments[3] = f"{name}_warmup1_2steps"
    # No download, and no worker processes, which take longer to start than these images to load.
    changed = {"DIR": str(data), "12": "0", "download=yes": "download=no"}
    arguments = [changed.get(argument, argument) for argument in arguments]
    results = tmp_path / "results"
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--results", str(results)])
    assert done.exit_code == 0, done.output
    assert "2 steps in" in done.output and len(list(results.glob(f"{task}/*/result.json"))) == 1
