"""Generated and listed parts of the reference."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import nnunet_cpr
from tests.helpers import ROOT
from tests.helpers.pages import DOCS, PAGES

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


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    """MkDocs checks those of the site."""
    for page in PAGES:
        if not page.is_relative_to(DOCS):
            for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
                if not target.startswith("https://"):
                    assert Path(page.parent / target).exists(), f"{page.name}: {target}"
