"""Generated and listed parts of the reference."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import nnunet_cpr
from tests.helpers import ROOT
from tests.helpers.pages import DOCS, GENERATED, PAGES

SCRIPT = ROOT / "docs" / "scripts" / "generate_reference.py"


def test_generated_parts_are_up_to_date() -> None:
    script = runpy.run_path(str(SCRIPT))
    for page in script["PAGES"]:
        assert (DOCS / "reference" / page).read_text() == script["generated"](page), f"run {SCRIPT}"


def test_environment_variables_are_listed() -> None:
    listed = (DOCS / "reference" / "files-and-variables.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "nnunet_cpr").rglob("*.py"))
    constants = set(re.findall(r'^[A-Z_]+ = "(NNUNET_CPR_\w+)"$', source, re.MULTILINE))
    assert "NNUNET_CPR_FUSED" in constants
    assert {name for name in constants if f"`{name}`" not in listed} == set()


def test_public_names_are_on_the_pages_of_the_api() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: nnunet_cpr\.(\w+)$", pages, re.MULTILINE))
    assert set(nnunet_cpr.__all__) <= shown


def test_relative_links_lead_to_committed_files() -> None:
    """A page that only the site has is missing where the repository is read."""
    committed: set[Path] = set()  # stays empty outside of a clone
    if shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
        committed = {(ROOT / name).resolve() for name in listed.stdout.split("\0") if name}
    missing = []
    for page in [*PAGES, *GENERATED.glob("*.md")]:
        text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.M | re.S)
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|href)=\"([^\"#]+)", text)
        for target in filter(None, map("".join, targets)):
            if not re.match(r"https?://|mailto:", target):
                path = (page.parent / target).resolve()
                if not (path in committed if committed else path.exists()):
                    missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert not missing
