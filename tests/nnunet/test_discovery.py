"""nnU-Net finds the trainers in every combination of regular and editable installs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import nnunet_cpr
from nnunet_cpr.names.families import FAMILIES
from tests.helpers import ROOT

DISCOVERY = ROOT / "nnunet_cpr" / "nnunet" / "discovery" / "nnunet_cpr_discovery.py"
TRAINER = "nnUNetTrainerCPR_ws20_3epochs"


@pytest.fixture(params=["nnunet_cpr_trainers", "trainers"])
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create the discovery module, the package and the trainers of a wheel or a checkout.

    Return the folder of trainers.
    """
    shutil.copy(DISCOVERY, tmp_path)
    (tmp_path / "nnunet_cpr").mkdir()
    (tmp_path / "nnunet_cpr" / "__init__.py").touch()
    trainers = tmp_path / request.param
    shutil.copytree(ROOT / "trainers", trainers)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "nnunet_cpr_discovery")
    return str(trainers)


def start(ending: str) -> None:
    """Do what Python does at startup with the file of that ending."""
    text = DISCOVERY.with_name(f"nnunet_cpr.{ending}").read_text().rstrip()
    if ending == "start":
        pkgutil.resolve_name(text)()
    else:
        exec(text)


@pytest.mark.parametrize("ending", ["pth", "start"])
@pytest.mark.parametrize("before", [None, "", "/mine", f"/mine{os.pathsep}/yours"])
def test_trainer_folder_is_appended_once(
    installed: str, monkeypatch: pytest.MonkeyPatch, before: str | None, ending: str
) -> None:
    monkeypatch.delenv("nnUNet_extTrainer", raising=False)
    if before is not None:
        monkeypatch.setenv("nnUNet_extTrainer", before)
    expected = os.pathsep.join([*([before] if before else []), installed])
    for _ in range(2):  # a child process inherits what its parent has set
        start(ending)
        assert os.environ["nnUNet_extTrainer"] == expected


@pytest.mark.parametrize("name", ["nnunet_cpr_trainers", "trainers"])
def test_copies_of_the_trainer_folder_leave_the_list(
    installed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """A parent process in another environment has listed its own; folders of users stay."""
    other, mine, taking = (tmp_path / folder / name for folder in ("other", "mine", "taking"))
    shutil.copytree(ROOT / "trainers", other)
    mine.mkdir(parents=True)
    taking.mkdir(parents=True)
    (taking / "nnUNetTrainerCPR.py").write_text("from nnunet_cpr.nnunet.trainer import *\n")
    users = [str(mine), str(taking), str(tmp_path / "missing" / name)]
    first, *rest = users
    for listed, expected in [
        ([str(other), *users], [*users, installed]),
        ([first, f"{other}{os.sep}", installed, *rest, installed], [first, installed, *rest]),
    ]:
        monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join(listed))
        start("start")
        assert os.environ["nnUNet_extTrainer"].split(os.pathsep) == expected


def test_variable_of_a_notebook_keeps_the_trainer_folder(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set after Python has started, and before nnU-Net's search is imported."""
    start("start")
    finders = len(sys.meta_path)
    for _ in range(2):
        monkeypatch.setenv("nnUNet_extTrainer", "/mine")
        monkeypatch.delitem(sys.modules, "nnunetv2.utilities.find_objects", raising=False)
        assert importlib.util.find_spec("nnunetv2.utilities.find_objects") is not None
        assert os.environ["nnUNet_extTrainer"] == f"/mine{os.pathsep}{installed}"
    assert len(sys.meta_path) == finders


def test_discovery_imports_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import runpy; "
        f"runpy.run_path({str(DISCOVERY)!r})['register'](); print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in done.stdout.split())


@pytest.mark.slow
def test_trainer_modules_import_little_more_than_nnunet() -> None:
    modules = sorted(path.stem for path in (ROOT / "trainers").glob("*.py"))
    assert modules == sorted(FAMILIES)
    code = (
        "import sys\n"
        "import nnunetv2.training.nnUNetTrainer.nnUNetTrainer\n"
        f"sys.path.insert(0, {str(ROOT / 'trainers')!r})\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        + "".join(f"import {module}\n" for module in modules)
        + "print(*{name.split('.')[0] for name in sys.modules} - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = set(done.stdout.split()) - set(sys.stdlib_module_names) - set(modules)
    assert added == {"nnunet_cpr"}


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder of links to all installed packages except nnU-Net and this one.

    Environments of a few megabytes see torch and the rest through it.
    """
    folder = tmp_path_factory.mktemp("dependencies")
    ours = ("nnunet", "_editable", "__editable", "__pycache__", "pip", "distutils-precedence")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(ours):
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def nnunet_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the installed nnU-Net as a source tree that pip can install, editable or not."""
    spec = importlib.util.find_spec("nnunetv2")
    assert spec is not None and spec.origin is not None
    folder = tmp_path_factory.mktemp("nnunet-source")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(spec.origin).parent, folder / "nnunetv2", ignore=ignore)
    scripts = "\n".join(
        f'{e.name} = "{e.value}"'
        for e in importlib.metadata.entry_points(group="console_scripts")
        if e.value.startswith("nnunetv2.")
    )
    (folder / "pyproject.toml").write_text(
        f"""
[build-system]
requires = ["setuptools>=67.8.0"]
build-backend = "setuptools.build_meta"
[project]
name = "nnunetv2"
version = "{importlib.metadata.version("nnunetv2")}"
[project.scripts]
{scripts}
[tool.setuptools.packages.find]
include = ["nnunetv2*"]
"""
    )
    return folder


class Environment:
    """Virtual environment with the dependencies of this one."""

    def __init__(self, folder: Path, dependencies: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.site = next(folder.glob("lib/python*/site-packages"))
        (self.site / "dependencies.pth").write_text(f"{dependencies}\n")

    def run(
        self, *command: str, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("nnUNet_", "PYTHON"))}
        environment |= variables
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            env=environment,
            capture_output=True,
            text=True,
            cwd=self.site.parent,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def install(self, *what: str) -> None:
        self.run("python", "-m", "pip", "install", "--no-deps", *what)

    def files(self) -> set[str]:
        found = self.site.rglob("*")
        return {
            str(f.relative_to(self.site))
            for f in found
            if "pip" not in f.parts and "__pycache__" not in f.parts
        }


@pytest.mark.parametrize(
    ("ours", "nnunet"),
    [
        pytest.param("regular", "editable", marks=pytest.mark.release),
        pytest.param("editable", "regular", marks=pytest.mark.slow),
    ],
)
def test_trainers_are_found_in_every_combination(
    ours: str,
    nnunet: str,
    tmp_path: Path,
    dependencies: Path,
    distributions: Path,
    nnunet_source: Path,
) -> None:
    env = Environment(tmp_path / "venv", dependencies)
    env.install(*(["-e"] if nnunet == "editable" else []), str(nnunet_source))
    before = env.files()
    if ours == "editable":
        env.install("-e", str(ROOT))
    else:
        env.install(*(str(wheel) for wheel in distributions.glob("*.whl")))
    new = env.files() - before
    assert not [f for f in new if f.startswith("nnunetv2")]
    assert {"nnunet_cpr.pth", "nnunet_cpr.start", "nnunet_cpr_discovery.py"} <= new

    assert f"nnunet-cpr: {nnunet_cpr.__version__}\n" in env.run("nnunet-cpr", "doctor").stdout

    # nnU-Net's command gets past the search for its trainer, to the missing data set.
    folders = {f"nnUNet_{n}": str(tmp_path) for n in ("raw", "preprocessed", "results")}
    train = ("nnUNetv2_train", "999", "3d_fullres", "0", "-device", "cpu", "-tr")
    done = env.run(*train, TRAINER, check=False, **folders)
    assert f"Using trainer '{TRAINER}'" in done.stdout and "999" in done.stderr

    # With a folder of the user's own, both are found.
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "my_trainer.py").write_text(
        "from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer\n"
        "class nnUNetTrainerCPRMine(nnUNetTrainer): pass\n"
    )
    for name in ("nnUNetTrainerCPRMine", TRAINER):
        done = env.run(*train, name, check=False, nnUNet_extTrainer=str(mine), **folders)
        assert f"Using trainer '{name}'" in done.stdout, done.stdout + done.stderr
    notebook = (
        f"import os; os.environ['nnUNet_extTrainer'] = {str(mine)!r}\n"
        "from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name as find\n"
        f"print(find('nnUNetTrainerCPRMine'), find({TRAINER!r}))"
    )
    assert f"{TRAINER}'>" in env.run("python", "-c", notebook).stdout

    env.run("python", "-m", "pip", "uninstall", "-y", "nnunet-cpr")
    assert env.files() == before
    assert not (env.site / "nnunet_cpr_trainers").exists()
    env.run(
        "python",
        "-c",
        "import nnunetv2, os; assert nnunetv2.__file__; assert 'nnUNet_extTrainer' not in os.environ",
    )
