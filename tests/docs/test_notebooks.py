"""Notebooks of the tutorials, executed on small data."""

from __future__ import annotations

import json
import os
import runpy
import sysconfig
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers import ROOT, archives

SCRIPT = ROOT / "docs" / "scripts" / "tutorials.py"
TUTORIALS = ROOT / "docs" / "tutorials"
SMALL = {
    "10epochs_25iters": "1epochs_2iters",
    "ws100": "k0p01",
    "warmup50": "warmup1",
    "[0, 1]": "[0]",
    "[1, 2, 3]": "[1]",
    "[8 * 2**stage": "[4",
    "-c 3d_fullres": "-c 3d_fullres -np 1",
    # Loading in the training's own process, which nnU-Net cannot plan with, saves the start of others.
    "nnunet-cpr study run laptop.yaml --device cpu --jobs 2": "nnUNet_n_proc_DA=0 "
    "nnunet-cpr study run laptop.yaml --device cpu -np 1",
}


def execute(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a notebook in a folder and return what it printed."""
    scripts = sysconfig.get_path("scripts")
    monkeypatch.setenv("PATH", os.pathsep.join([scripts, os.environ["PATH"]]))
    monkeypatch.setenv("MPLBACKEND", "agg")
    client = NotebookClient(notebook, timeout=3000, resources={"metadata": {"path": str(folder)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def test_notebooks_are_those_of_the_pages() -> None:
    script = runpy.run_path(str(SCRIPT))
    for page in script["PAGES"]:
        assert (TUTORIALS / f"{page}.ipynb").read_text() == script["notebook"](page), f"run {SCRIPT}"


@pytest.mark.slow  # 20 seconds
def test_plain_pytorch_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(TUTORIALS / "plain-pytorch.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.source.startswith("%%bash"):
            assert "pip install" in cell.source
            cell.source = ""
    printed = execute(notebook, tmp_path, monkeypatch)
    assert "equal; multiplier" in printed and "CPR, bound after 60 steps" in printed


@pytest.mark.release  # minutes
def test_study_notebook_runs_on_small_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives.make_decathlon(tmp_path, "Task04_Hippocampus", cases=5)
    monkeypatch.setenv("nnUNet_compile", "f")
    notebook = nbformat.read(TUTORIALS / "hippocampus.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if "curl" in cell.source or "pip install" in cell.source:
            cell.source = ""
        for text, small in SMALL.items():
            cell.source = f"{cell.source}\n".replace(text, small).rstrip("\n")
    printed = execute(notebook, tmp_path, monkeypatch)
    assert "2 of 2 done" in printed
    report = tmp_path / "nnUNet_results" / "studies" / "laptop" / "report"
    assert (report / "report.html").is_file()
    (card,) = (tmp_path / "shared").rglob("model_card.md")
    assert "nnUNetTrainerAdamCPR_k0p01_lr3en3_warmup1_1epochs_2iters_seed1" in card.read_text()
    (plans,) = (tmp_path / "shared").rglob("plans.json")
    assert json.loads(plans.read_text())["plans_name"] == "nnUNetPlansSmall"
