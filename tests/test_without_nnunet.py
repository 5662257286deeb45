"""The optimizers in an environment without nnU-Net, and what everything else says there."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from nnunet_cpr.environment import COMMANDS_NEED
from tests.helpers import ROOT

PAGE = ROOT / "docs" / "how-to" / "training-loop.md"
OPTIMIZERS_NEED = ("torch", "numpy", "numba", "packaging", "lazy-loader")

EVERY_OPTIMIZER = """
import tempfile, torch
from nnunet_cpr import CPR, SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.baselines import WeightNormControl
from nnunet_cpr.optimizers import FusedAdam, FusedSGD, Muon

BUILD = {
    "SGDCPR": lambda model: SGDCPR(model, lr=0.01, momentum=0.9, kappa="ws2"),
    "AdamCPR": lambda model: AdamCPR(model, kappa="ip1"),
    "MuonCPR": lambda model: MuonCPR(model, kappa="ki0x1"),
    "Muon": lambda model: Muon(model, lr=0.01),
    "FusedSGD": lambda model: FusedSGD(model.parameters(), lr=0.01, momentum=0.9),
    "FusedAdam": lambda model: FusedAdam(model.parameters()),
    "attached": lambda model: CPR(model, kappa="k0p1").attach(torch.optim.NAdam(model.parameters())),
    "baseline": lambda model: WeightNormControl(model, 0.1).attach(torch.optim.SGD(model.parameters())),
}

def build(name):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
    model = torch.nn.Sequential(*layers)
    return model, BUILD[name](model)

def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(32, 8)).square().mean().backward()
    optimizer.step()

for name in BUILD:
    model, optimizer = build(name)
    for seed in range(4):
        step(model, optimizer, seed)
    with tempfile.TemporaryFile() as file:
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
    again, loaded = build(name)
    again.load_state_dict(states[0])
    loaded.load_state_dict(states[1])
    for each in ((model, optimizer), (again, loaded)):
        step(*each, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters())), name
    print(name)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def requirements(*roots: str) -> set[str]:
    """Return the distributions that are installed with others, and these."""
    found: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another system
            continue
        if name not in found:
            found.add(name)
            todo += [re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line]
    return found


def link(names: tuple[str, ...], folder: Path) -> None:
    """Link the files of distributions into a folder, as they lie in site-packages."""
    parts = {
        distribution.locate_file(path.parts[0])
        for distribution in map(importlib.metadata.distribution, requirements(*names))
        for path in distribution.files or ()
        if path.parts[0] != ".."  # scripts
    }
    for part in map(Path, map(str, parts)):
        (folder / part.name).symlink_to(part)


@pytest.fixture(scope="module", params=["linked", pytest.param("installed", marks=pytest.mark.release)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs Python with the package and what its optimizers need, nothing else.

    "installed" is a new environment that is made by the commands of the page; "linked" has links to the
    files of this one.
    """
    folder = tmp_path_factory.mktemp("environment")
    if request.param == "linked":
        link(OPTIMIZERS_NEED, folder)
        (folder / "nnunet_cpr").symlink_to(ROOT / "nnunet_cpr")
        start = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})"]
    else:
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        for command in install_commands():
            subprocess.run([python, "-m", *command.split()], cwd=ROOT, check=True, timeout=1800)
        start = [python, "-I", "-c", ""]

    def run(code: str) -> subprocess.CompletedProcess[str]:
        *python, before = start
        command = [*python, f"{before}\n{code}"]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)

    return run


def install_commands() -> list[str]:
    return re.findall(r"^pip install (?:torch|--no-deps).*", PAGE.read_text(), re.MULTILINE)


def test_page_installs_what_the_optimizers_need() -> None:
    first, second = install_commands()
    assert first.split()[2:] == list(OPTIMIZERS_NEED)
    assert second == "pip install --no-deps ."


def test_every_dependency_is_checked() -> None:
    required = importlib.metadata.requires("nnunet-cpr") or []
    distributions = {re.split(r"[^\w-]", line)[0].lower() for line in required if "extra ==" not in line}
    of_module = importlib.metadata.packages_distributions()
    checked = {of_module[module][0].lower() for module in COMMANDS_NEED}
    assert checked | set(OPTIMIZERS_NEED) == distributions


def test_every_optimizer_steps_saves_and_loads(run: Run) -> None:
    done = run(EVERY_OPTIMIZER)
    assert done.stdout.split() == [
        "SGDCPR", "AdamCPR", "MuonCPR", "Muon", "FusedSGD", "FusedAdam", "attached", "baseline",
    ], done.stderr  # fmt: skip


@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "trainers", "finish", "extend", "prepare", "export", "demo", "doctor",
     "study run hippocampus", "study report hippocampus", "vision run digits SGD"],
)  # fmt: skip
def test_commands_name_missing_packages_in_one_line(run: Run, command: str) -> None:
    done = run(
        f"import sys; sys.argv = ['nnunet-cpr', *{command.split()}]\n"
        "from nnunet_cpr.__main__ import main; main()"
    )
    assert done.returncode == 1
    assert not done.stdout
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("nnunet-cpr: expected nnunetv2, matplotlib, ")
    assert done.stderr.endswith("run pip install . in a clone of nnunet-cpr, without --no-deps\n")


@pytest.mark.parametrize(
    ("module", "missing"),
    [("nnunet.trainer", "nnunetv2, "), ("studies", ""), ("reports", ""), ("datasets.registry", "")],
)
def test_modules_name_missing_packages(run: Run, module: str, missing: str) -> None:
    done = run(f"import nnunet_cpr.{module}")
    last = done.stderr.splitlines()[-1]
    package = module.partition(".")[0]
    assert last.startswith(f"ModuleNotFoundError: nnunet_cpr.{package}: expected {missing}")


@pytest.mark.parametrize("missing", COMMANDS_NEED)
def test_each_missing_package_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nnunet_cpr import __main__, environment

    find = environment.find_spec
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(SystemExit, match=f"^nnunet-cpr: expected {missing} to be installed; run pip"):
        __main__.main()
