"""What a study compares, and the small YAML file that says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from nnunet_cpr.files import replacing

PRESETS = Path(__file__).parent / "presets"


class StudyError(ValueError):
    """A study's file says something that cannot be run; the message is one line."""


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
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise StudyError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise StudyError(f"{path} is not a study: it must be a mapping with datasets and trainers")
    return _study(document, path)


def save(study: Study, path: Path) -> None:
    """Write a study as a file that :func:`load` reads."""
    document = asdict(study)
    document["trainers"] = [{k: v for k, v in row.items() if v} for row in document.pop("rows")]
    lists = {key: list(document[key]) for key in _LISTS}
    with replacing(path) as temporary:
        temporary.write_text(yaml.safe_dump({**document, **lists}, sort_keys=False))


def presets() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _study(document: dict[str, Any], path: Path) -> Study:
    known = {f.name for f in fields(Study)} - {"rows"} | {"trainers"}
    for key in document:
        if key not in known:
            raise StudyError(f"{path}: unknown entry {key!r}; a study has {', '.join(sorted(known))}")
    entries = _listed(document.get("trainers"))
    if not entries:
        raise StudyError(f"{path}: trainers must name at least one trainer")
    rows = [_row(entry, path) for entry in entries]
    values = {key: tuple(_listed(value)) for key, value in document.items() if key in _LISTS}
    study = Study(
        name=str(document.get("name", path.stem)),
        rows=tuple(rows),
        reference=str(document.get("reference", rows[0].trainer)),
        source=str(document.get("source", "")),
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
            f"{', '.join(sorted(known - {'trainer'}))}; got {entry!r}"
        )
    texts = {k: str(v) for k, v in entry.items() if k != "published"}
    try:
        published = {str(k): float(v) for k, v in dict(entry.get("published") or {}).items()}
    except (TypeError, ValueError) as error:
        raise StudyError(f"{path}: published of {entry['trainer']} must be DATASET: DICE") from error
    return Row(**texts, published=published)


def _checked(study: Study, where: str) -> Study:
    trainers = [row.trainer for row in study.rows]
    for trainer in trainers:
        if not trainer.isidentifier():
            raise StudyError(f"{where}: {trainer!r} is no name of a trainer")
        if trainers.count(trainer) > 1:
            raise StudyError(f"{where}: the trainer {trainer} is there twice")
    if study.reference not in trainers:
        raise StudyError(f"{where}: the reference {study.reference} is not among its trainers")
    if not re.fullmatch(r"[\w.-]+", study.name):
        raise StudyError(f"{where}: the name {study.name!r} must be letters, digits, '_', '-', '.'")
    for fold in study.folds:
        if isinstance(fold, bool) or not isinstance(fold, int) or fold < 0:
            raise StudyError(f"{where}: a fold is a number from 0 on, not {fold!r}")
    for what in _LISTS:
        values = getattr(study, what)
        if what != "folds" and not all(isinstance(value, str) for value in values):
            raise StudyError(f"{where}: {what} must be names, not {list(values)!r}")
        if len(set(values)) < len(values) or not (values or what == "datasets"):
            raise StudyError(f"{where}: {what} must be there, each once; got {list(values)!r}")
    return study
