"""What a study compares, and the small YAML file that says so."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from nnunet_cpr._files import atomic_write

PRESETS = Path(__file__).parent / "presets"


_LARGEST = 2**18
"""Bytes of a study's file."""
_MOST = 100_000
"""Trainings of a study."""


class StudyError(ValueError):
    """A study's file says something that cannot be run; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(_cut(" ".join(message.splitlines()), 1000))


@dataclass(frozen=True)
class Row:
    """One trainer of a study."""

    trainer: str
    """The name that nnU-Net finds it by: ours, nnU-Net's or somebody else's."""
    label: str = ""
    """What tables call it; without one its name."""
    group: str = ""
    """The heading that it shares with others, such as an optimizer's name."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Published mean foreground Dice in percent, for each data set that has one."""

    @property
    def title(self) -> str:
        return self.label or self.trainer


@dataclass(frozen=True)
class Cell:
    """One training and its validation."""

    dataset: str
    configuration: str
    plans: str
    fold: int
    trainer: str

    @property
    def key(self) -> str:
        """A name that is good for a file."""
        return f"{self.dataset}__{self.trainer}__{self.plans}__{self.configuration}__fold_{self.fold}"

    def folder(self, results: Path) -> Path:
        """Where nnU-Net puts it below ``nnUNet_results``."""
        model = f"{self.trainer}__{self.plans}__{self.configuration}"
        return results / self.dataset / model / f"fold_{self.fold}"


@dataclass(frozen=True)
class Study:
    """Data sets x configurations x plans x trainers x folds.

    Attributes:
        name: names its folder.
        datasets: nnU-Net's names, ``DatasetXXX_Name``.
        reference: the trainer that the others are compared with.
        source: where the published numbers are from.
    """

    name: str
    datasets: Sequence[str]
    rows: Sequence[Row]
    reference: str
    folds: Sequence[int] = (0, 1, 2, 3, 4)
    configurations: Sequence[str] = ("3d_fullres",)
    plans: Sequence[str] = ("nnUNetPlans",)
    source: str = ""

    def cells(self) -> Iterator[Cell]:
        """All trainings, fold by fold, so that early results compare all trainers."""
        for dataset, configuration, plans, fold, row in product(
            self.datasets, self.configurations, self.plans, self.folds, self.rows
        ):
            yield Cell(dataset, configuration, plans, fold, row.trainer)

    def row(self, trainer: str) -> Row:
        """The row of a trainer."""
        return next(row for row in self.rows if row.trainer == trainer)

    def changed(
        self,
        name: str = "",
        datasets: Sequence[str] = (),
        folds: Sequence[int] = (),
        configurations: Sequence[str] = (),
        plans: Sequence[str] = (),
    ) -> Study:
        """With these instead of its own, where there are any."""
        given = {"datasets": datasets, "folds": folds, "configurations": configurations, "plans": plans}
        changes: dict[str, Any] = {k: tuple(v) for k, v in given.items() if v}
        return _checked(replace(self, name=name or self.name, **changes), name or self.name)


def load(name: str) -> Study:
    """A study from a YAML file or from a preset's name.

    Raises:
        StudyError: there is no such file or preset, or it is not a study.
    """
    path = Path(name)
    if not path.is_file():
        path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        raise StudyError(f"there is no file {name!r}, and the presets are {', '.join(presets())}")
    if path.stat().st_size > _LARGEST:
        raise StudyError(f"{path} is not a study: it is larger than {_LARGEST // 1024} KiB")
    try:
        document = yaml.load(path.read_bytes(), _Loader)
    except RecursionError as error:
        raise StudyError(f"{path} is not a study: it is nested too deeply") from error
    # PyYAML tells of a value that is not what its tag says by whatever fails in it.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise StudyError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise StudyError(f"{path} is not a study: it must be a mapping with datasets and trainers")
    return _study(document, path)


def save(study: Study, path: Path) -> None:
    """Write a study as a file that :func:`load` reads."""
    document = asdict(study)
    document["trainers"] = [{k: v for k, v in row.items() if v} for row in document.pop("rows")]
    lists = {key: list(document[key]) for key in _LISTS}
    with atomic_write(path) as temporary:
        temporary.write_text(yaml.safe_dump({**document, **lists}, sort_keys=False))


def presets() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


class _Loader(yaml.SafeLoader):
    """Plain YAML, each key once, without aliases: they let a small file say something huge."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "write it out instead of an alias (*)", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next((_shown(key) for key in keys if keys.count(key) > 1), "a key")
            mark = node.start_mark
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is there twice", mark)
        return mapping

    def construct_yaml_int(self, node: Any) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > 63:  # Python itself refuses to print much larger ones
            raise ValueError("a number is too large")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _study(document: dict[Any, Any], path: Path) -> Study:
    known = {f.name for f in fields(Study)} - {"rows"} | {"trainers"}
    for key in document:
        if key not in known:
            raise StudyError(
                f"{path}: unknown entry {_shown(key)}; a study has {', '.join(sorted(known))}"
            )
    entries = _listed(document.get("trainers"))
    if not entries:
        raise StudyError(f"{path}: trainers must name at least one trainer")
    rows = [_row(entry, path) for entry in entries]
    values = {key: tuple(_listed(value)) for key, value in document.items() if key in _LISTS}
    study = Study(
        name=_text(document.get("name", path.stem), "name", path),
        rows=tuple(rows),
        reference=_text(document.get("reference", rows[0].trainer), "reference", path),
        source=_text(document.get("source", ""), "source", path),
        **{"datasets": (), **values},
    )
    return _checked(study, str(path))


_LISTS = ("datasets", "folds", "configurations", "plans")


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _row(entry: Any, path: Path) -> Row:
    if isinstance(entry, str):
        return Row(entry)
    known = {f.name for f in fields(Row)}
    if not isinstance(entry, dict) or "trainer" not in entry or not entry.keys() <= known:
        raise StudyError(
            f"{path}: a trainer is a name or a mapping with 'trainer' and, if wanted, "
            f"{', '.join(sorted(known - {'trainer'}))}; got {_shown(entry)}"
        )
    texts = {k: _text(v, k, path) for k, v in entry.items() if k != "published"}
    try:
        published = {str(k): float(v) for k, v in (entry.get("published") or {}).items()}
    except (AttributeError, TypeError, ValueError):
        published = {"": math.nan}
    if not all(0 <= dice <= 100 for dice in published.values()):
        raise StudyError(f"{path}: published of {texts['trainer']} must be DATASET: DICE, in percent")
    return Row(**texts, published=published)


def _text(value: Any, what: str, path: Path) -> str:
    """One line of what can be printed."""
    text = " ".join(str(value).split()) if isinstance(value, str | int | float | date) else None
    if text is None or any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise StudyError(f"{path}: {what} must be a line of text, not {_shown(value)}")
    return text


def _shown(value: Any) -> str:
    return _cut(repr(value), 80)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _checked(study: Study, where: str) -> Study:
    trainers = [row.trainer for row in study.rows]
    for trainer in trainers:
        if not trainer.isidentifier():
            raise StudyError(f"{where}: {_shown(trainer)} is no name of a trainer")
    for trainer, times in Counter(trainers).items():
        if times > 1:
            raise StudyError(f"{where}: the trainer {trainer} is there twice")
    if study.reference not in trainers:
        raise StudyError(f"{where}: the reference {study.reference} is not among its trainers")
    if not re.fullmatch(r"[\w.-]+", study.name) or not study.name.strip("."):
        raise StudyError(
            f"{where}: the name {_shown(study.name)} must be letters, digits, '_', '-', '.'"
        )
    for fold in study.folds:
        if isinstance(fold, bool) or not isinstance(fold, int) or not 0 <= fold < 10**6:
            raise StudyError(f"{where}: a fold is a number from 0 on, not {_shown(fold)}")
    for what in _LISTS:
        values = getattr(study, what)
        if what != "folds" and not all(_is_name(value) for value in values):
            raise StudyError(f"{where}: {what} must be names, not {_shown(list(values))}")
        if len(set(values)) < len(values) or not (values or what == "datasets"):
            raise StudyError(f"{where}: {what} must be there, each once; got {_shown(list(values))}")
    names = (study.datasets, trainers, study.plans, study.configurations)
    if sum(max((len(name.encode()) for name in each), default=0) for each in names) > 200:
        raise StudyError(f"{where}: its names are too long together, as files are named after them")
    count = math.prod(
        map(len, (study.datasets or "?", trainers, *(getattr(study, w) for w in _LISTS[1:])))
    )
    if count > _MOST:
        raise StudyError(f"{where}: these are {count} trainings, and a study has {_MOST} at the most")
    return study


def _is_name(value: Any) -> bool:
    """Whether it can be a folder's name, and no command would take it for an option."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w .+-]*", value) is not None
