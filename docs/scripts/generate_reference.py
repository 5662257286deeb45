"""Write the generated parts of the reference: ``python docs/scripts/generate_reference.py``.

A generated part of a page stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; the page of
the commands is generated as a whole. With ``--check`` the committed pages are only compared, and the
exit status is 1 if one is out of date.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer.main

from nnunet_cpr.cli import app
from nnunet_cpr.integrations import from_timm
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.trainer_name import TrainerName, suffix_table
from nnunet_cpr.studies.study import METRIC_NAMES, Study, TrainerEntry

REFERENCE = Path(__file__).parents[1] / "reference"


def families() -> str:
    """Return the table of the families, with what each trains without a suffix."""
    lines = ["| name | optimizer | learning rate | regularization |", "| --- | --- | --- | --- |"]
    for family in FAMILIES.values():
        if family.optimizer == "timm":  # which need the name of an optimizer
            continue
        training = TrainerName(family.name).training
        rows = dict(training.rows())
        optimizer = rows["family"].partition(": ")[2]
        method = (
            f"CPR, bound `_{training.kappa}`" if family.cpr else f"weight decay: {rows['weight decay']}"
        )
        lines.append(f"| `{family.name}` | {optimizer} | {rows['learning rate']} | {method} |")
    return "\n".join(lines)


def suffixes() -> str:
    """Return the table of suffixes, with the families that take each of them."""
    rows = [f"| `{syntax}` | {families} | {meaning} |" for syntax, families, meaning in suffix_table()]
    return "\n".join(["| suffix | families | meaning |", "| --- | --- | --- |", *rows])


def timm_names() -> str:
    """Return the names of timm's optimizers, those that train here and the others by reason."""
    by_reason: dict[str, list[str]] = {}
    for name in from_timm.list_names():
        by_reason.setdefault(from_timm.refusal(name), []).append(f"`{name}`")
    usable = by_reason.pop("")
    lines = [f"- {len(usable)} train here: {', '.join(usable)}."]
    lines += [f"- Not {', '.join(names)}: {reason}." for reason, names in by_reason.items()]
    return "\n".join(lines)


def commands() -> str:
    """Return the help of every command."""
    return "\n\n".join(_sections(typer.main.get_command(app), "nnunet-cpr"))


# Only attributes of commands and parameters that Typer and Click share: Typer has a Click of its own.
def _sections(command: Any, name: str) -> Iterator[str]:
    children = getattr(command, "commands", None)
    if children is None:
        yield "\n".join([f"## {name}", "", *_help_of(command, name)])
        return
    for child, found in children.items():
        if not found.hidden:
            yield from _sections(found, f"{name} {child}")


def _help_of(command: Any, name: str) -> Iterator[str]:
    yield _plain(command.help or "")
    parameters = [p for p in command.params if not getattr(p, "hidden", False)]
    usage = [name, "[OPTIONS]"]
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            shown = _placeholder(parameter)
            usage.append(shown if parameter.required else f"[{shown}]")
    yield from ("", "```text", " ".join(usage), "```")
    if parameters:
        yield from ("", "| argument or option | meaning | default |", "| --- | --- | --- |")
        yield from map(_row, parameters)


def _placeholder(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return f"{name}..." if parameter.nargs == -1 else name


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{_placeholder(parameter)}`"
    else:
        names = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag:
            names += f" `{_placeholder(parameter)}`"
    default = getattr(parameter.default, "value", parameter.default)
    shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    if parameter.name == "processes":
        shown = "from the number of cores"
    return f"| {names} | {_plain(parameter.help or '')} | {shown} |"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def study_entries() -> str:
    """Return the table of the entries of a study file."""
    return _entries(Study, {"name": "that of the file", "datasets": "`--dataset`"})


def trainer_entries() -> str:
    """Return the table of the entries of a trainer in a study file."""
    return _entries(TrainerEntry)


def _entries(kind: type, defaults: Mapping[str, str] = MappingProxyType({})) -> str:
    meanings = _attributes(kind)
    rows = ["| entry | meaning | default |", "| --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        default = defaults.get(field.name) or _default(field)
        rows.append(f"| `{field.name}` | {meanings[field.name]} | {default} |")
    return "\n".join(rows)


def _default(field: dataclasses.Field[object]) -> str:
    # pydantic's dataclasses wrap factories and values in its own FieldInfo.
    default = getattr(field.default, "default_factory", None) or field.default
    if default is dataclasses.MISSING:
        return "required"
    value = default() if callable(default) else default
    if isinstance(value, dict):
        return f"`{value[METRIC_NAMES[0]]}`" if value else ""
    if isinstance(value, tuple):
        return ", ".join(f"`{each}`" for each in value)
    return f"`{value}`" if value not in ("", False) else ""


def _attributes(kind: type) -> dict[str, str]:
    """Return the entries of the section Attributes of a docstring, by name."""
    text = inspect.cleandoc(kind.__doc__ or "") + "\n"
    section = re.search(r"^Attributes:\n((?: {4}.*\n)+)", text, re.M)
    if section is None:
        raise ValueError(f"{kind.__name__}: expected a section Attributes in the docstring, found none")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section[1], re.M)
    return {name: re.sub(r"``(.*?)``", r"`\1`", " ".join(text.split())) for name, text in entries}


PAGES = {
    "../how-to/other-optimizers.md": {"timm": timm_names},
    "trainer-names.md": {"families": families, "suffixes": suffixes},
    "study-file.md": {"study": study_entries, "trainer": trainer_entries},
    "commands.md": {},
}
"""Generated parts by page and name; of the page of the commands everything."""


def generated(page: str) -> str:
    """Return the content of a page of :data:`PAGES` with its generated parts renewed.

    Raises:
        ValueError: a part has no place in the page.
    """
    if page == "commands.md":
        return commands_page()
    text = (REFERENCE / page).read_text()
    for name, make in PAGES[page].items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{page}: expected {begin} and {end}; add them where the part belongs")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{make()}\n\n{end}{rest.split(end)[1]}"
    return text


def commands_page() -> str:
    """Return the page of the commands."""
    return (
        "# Commands\n\n`nnunet-cpr --help`, or `nnunet-cpr COMMAND --help`, prints the same text. "
        "`nnunet-cpr --install-completion` installs shell completion.\n\n" + commands() + "\n"
    )


def main() -> None:
    """Write the generated parts, or check them."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the reference.")
    parser.add_argument("--check", action="store_true", help="Check the committed pages instead.")
    check = parser.parse_args().check
    old = [page for page in PAGES if (REFERENCE / page).read_text() != generated(page)]
    for page in old:
        print(f"{page} is out of date; run this script" if check else f"wrote {page}")
        if not check:
            (REFERENCE / page).write_text(generated(page))
    sys.exit(1 if check and old else 0)


if __name__ == "__main__":
    main()
