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


def tracked(*patterns: str) -> set[str]:
    done = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines())


@pytest.mark.slow  # a minute for the builds
def test_sdist_and_wheel_are_complete(tmp_path: Path) -> None:
    for command in (["build", "--outdir", str(tmp_path), str(ROOT)], ["twine", "check", "--strict"]):
        built = map(str, tmp_path.iterdir())
        done = subprocess.run(
            [sys.executable, "-m", *command, *built], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2

    with zipfile.ZipFile(tmp_path / f"nnunet_cpr-{VERSION}-py3-none-any.whl") as archive:
        wheel = set(archive.namelist())
    package = {name for name in tracked("nnunet_cpr") if "/discovery/" not in name}
    trainers = {f"nnunet_cpr_trainers/{Path(name).name}" for name in tracked("trainers")}
    info = {name for name in wheel if name.startswith(f"nnunet_cpr-{VERSION}.dist-info/")}
    discovery = {"nnunet_cpr.pth", "nnunet_cpr.start", "nnunet_cpr_discovery.py"}
    assert wheel - info == package | trainers | discovery
    assert f"nnunet_cpr-{VERSION}.dist-info/licenses/LICENSE" in info

    with tarfile.open(tmp_path / f"nnunet_cpr-{VERSION}.tar.gz") as archive:
        sdist = {name.removeprefix(f"nnunet_cpr-{VERSION}/") for name in archive.getnames()}
    folders = tracked("nnunet_cpr", "trainers", "tests", "benchmarks", "docs")
    files = {
        "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md",
        "SECURITY.md", "mkdocs.yml",
    }  # fmt: skip
    assert folders | files <= sdist
    assert not [name for name in sdist if name.startswith((".ci", ".github", "site/"))]
