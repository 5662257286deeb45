"""Contents and metadata of the sdist and the wheel."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import nnunet_cpr
from tests.helpers import ROOT

VERSION = nnunet_cpr.__version__


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> set[str]:
    (path,) = distributions.glob("*.whl")
    assert path.name == f"nnunet_cpr-{VERSION}-py3-none-any.whl"
    return set(zipfile.ZipFile(path).namelist())


@pytest.fixture(scope="module")
def sdist(distributions: Path) -> set[str]:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = archive.getnames()
    prefix = f"nnunet_cpr-{VERSION}/"
    return {name.removeprefix(prefix) for name in names}


def tracked(*patterns: str) -> set[str]:
    done = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines())


@pytest.mark.slow  # a minute for the builds
def test_twine_accepts_both(distributions: Path) -> None:
    files = [str(path) for path in distributions.iterdir()]
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


@pytest.mark.slow
def test_wheel_has_the_package_and_nothing_else(wheel: set[str]) -> None:
    package = {name for name in tracked("nnunet_cpr") if "/discovery/" not in name}
    trainers = {f"nnunet_cpr_trainers/{Path(name).name}" for name in tracked("trainers")}
    info = {name for name in wheel if name.startswith(f"nnunet_cpr-{VERSION}.dist-info/")}
    discovery = {"nnunet_cpr.pth", "nnunet_cpr_discovery.py"}
    assert wheel - info == package | trainers | discovery
    assert f"nnunet_cpr-{VERSION}.dist-info/licenses/LICENSE" in info


@pytest.mark.slow
def test_sdist_has_what_building_and_testing_need(sdist: set[str]) -> None:
    folders = tracked("nnunet_cpr", "trainers", "tests", "benchmarks", "docs")
    files = {
        "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md",
        "SECURITY.md", "mkdocs.yml",
    }  # fmt: skip
    assert folders | files <= sdist
    assert not [name for name in sdist if name.startswith((".ci", ".github", "site/"))]
