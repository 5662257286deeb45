"""Study files and presets: the data sets, trainers, folds and seeds that a study compares."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from nnunet_cpr._files import atomic_write
from nnunet_cpr._spelling import nearest_first, parse_numbers, with_seed

PRESETS = Path(__file__).parent / "presets"
METRIC_NAMES = ("dice", "hd95", "nsd")
DEFAULT_MARGIN = 0.1
"""Points of Dice or NSD, or mm of HD95."""
DEFAULT_TOLERANCE = 2.0
"""Tolerance of the NSD in mm."""


class StudyError(ValueError):
    """Invalid study; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class Run:
    """One training and its validation.

    Attributes:
        trainer: class name that nnU-Net trains, with ``_seed<N>`` if the study has seeds.
        entry: class name of the trainer in the study, without the seed; ``trainer`` if empty.
        seed: seed of the training; None if the study has no seeds.

    Example:
        >>> run = Run("Dataset004_Hippocampus", "3d_fullres", "nnUNetPlans", 0, "nnUNetTrainerCPR")
        >>> run.folder(Path("nnUNet_results")).as_posix()
        'nnUNet_results/Dataset004_Hippocampus/nnUNetTrainerCPR__nnUNetPlans__3d_fullres/fold_0'
    """

    dataset: str
    configuration: str
    plans: str
    fold: int
    trainer: str
    entry: str = ""
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry", self.entry or self.trainer)

    @property
    def fold_and_seed(self) -> str:
        """Fold and seed in words, such as "fold 0, seed 1"."""
        return f"fold {self.fold}" + ("" if self.seed is None else f", seed {self.seed}")

    @property
    def key(self) -> str:
        """Unique name for the run's files."""
        return f"{self.dataset}__{self.trainer}__{self.plans}__{self.configuration}__fold_{self.fold}"

    def folder(self, results: Path) -> Path:
        """Return nnU-Net's folder for this run below ``nnUNet_results``."""
        model = f"{self.trainer}__{self.plans}__{self.configuration}"
        return results / self.dataset / model / f"fold_{self.fold}"


# Types of the entries of a study file

_T = TypeVar("_T")


def _check(is_valid: Callable[[Any], Any], expected: str) -> AfterValidator:
    """Return a validator that refuses values with an error such as "expected printable text"."""

    def validate(value: _T) -> _T:
        if not is_valid(value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(validate)


def _as_text(value: Any) -> Any:
    """Return text and numbers as one line of text, an empty entry as "", and anything else as it is."""
    if value is None:
        return ""
    is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    return " ".join(str(value).split()) if is_scalar else value


def _as_number(value: Any) -> Any:
    """Return text such as 1e-1, which is no number in YAML 1.1, as a number."""
    is_number = isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?e[-+]?\d+", value, re.IGNORECASE)
    return float(value) if is_number else value


def _as_margins(value: Any) -> Any:
    return value if isinstance(value, dict) else dict.fromkeys(METRIC_NAMES, value)


def _numbers(kind: str) -> BeforeValidator:
    """Return a validator that takes text such as "1-3" for folds and seeds."""

    def validate(value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return parse_numbers(kind, str(value)) if is_number or isinstance(value, str) else value

    return BeforeValidator(validate, json_schema_input_type=_Scalar | list[int] | None)


def _as_tuple(value: Any) -> Any:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


_NOT_EMPTY = _check(len, "at least one value")
_Scalar = str | int | float
_Unique = Annotated[
    tuple[_T, ...],
    BeforeValidator(_as_tuple, json_schema_input_type=_Scalar | list[_Scalar] | None),
    _check(lambda values: len(set(values)) == len(values), "each value once"),
]
_Text = Annotated[
    StrictStr,
    BeforeValidator(_as_text, json_schema_input_type=_Scalar | None),
    _check(str.isprintable, "printable text"),
]
_ClassName = Annotated[StrictStr, _check(str.isidentifier, "the class name of a trainer")]
# A name that starts with a dash would be an option of nnU-Net's commands.
_FolderName = Annotated[
    StrictStr,
    _check(
        re.compile(r"\w[\w .+-]*").fullmatch, "a name of letters, digits, blanks and '_', '-', '.', '+'"
    ),
]
_StudyName = Annotated[
    _Text,
    _check(
        re.compile(r"(?!-)(?!\.*$)[\w.-]+").fullmatch,
        "a name of letters, digits, '_', '-' and '.', not '-' first",
    ),
]
_Fold = Annotated[StrictInt, Field(ge=0, lt=10**6)]
_Seed = Annotated[StrictInt, Field(ge=0, lt=10**9)]
_Number = Annotated[float, BeforeValidator(_as_number, json_schema_input_type=float), Field(strict=True)]
_Percent = Annotated[_Number, Field(ge=0, le=100)]
_Metric = Annotated[StrictStr, _check(METRIC_NAMES.__contains__, f"one of {', '.join(METRIC_NAMES)}")]
_Distance = Annotated[_Number, Field(gt=0, le=1000)]
_Margin = Annotated[_Number, Field(gt=0, le=100)]


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainerEntry:
    """One trainer of a study.

    Attributes:
        trainer: class name of any trainer that nnU-Net finds.
        label: name in tables; the class name if empty.
        group: heading shared with other trainers, such as the name of an optimizer.
        published: published mean foreground Dice in percent by data set.
    """

    trainer: _ClassName
    label: _Text = ""
    group: _Text = ""
    published: Annotated[dict[_FolderName, _Percent], BeforeValidator(lambda value: value or {})] = (
        Field(default_factory=dict)
    )

    @property
    def title(self) -> str:
        """Name in tables."""
        return self.label or self.trainer

    @property
    def full_title(self) -> str:
        """Group and title; a label such as "1e-3" is not clear without its group."""
        return f"{self.group} {self.title}" if self.group else self.title


def _as_entry(value: Any) -> Any:
    return {"trainer": value} if isinstance(value, str) else value


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Study:
    """Data sets x configurations x plans x folds x seeds x trainers.

    Attributes:
        name: name of the study's folder.
        datasets: nnU-Net's names, ``DatasetXXX_Name``, or numbers, which the command replaces by them.
        trainers: the trainers to compare.
        reference: class name of the trainer that the others are compared with; the first if empty.
        folds: numbers of the folds, also as ``0-2`` or ``all``.
        configurations: nnU-Net's names, such as ``3d_fullres``.
        plans: nnU-Net's names, such as ``nnUNetPlans``.
        source: origin of the published numbers.
        seeds: seeds of the runs of each fold, also as ``1-3``; empty for one run with nnU-Net's own
            seeding.
        metrics: metrics of the tables and comparisons: ``dice``, ``hd95``, ``nsd``.
        tolerance: tolerance of ``nsd`` in mm.
        margin: largest difference that counts as equivalent, for each metric: Dice and NSD in points,
            HD95 in mm. A single number holds for all metrics.
        non_inferior_to: class name of the trainer that the others are tested not to be worse than by
            more than the margin; the reference if empty.
        select: compare the best setting of each group, selected on the other folds, in place of all
            settings.

    Example:
        >>> trainers = ["nnUNetTrainerSGD", "nnUNetTrainerCPR"]
        >>> study = Study("mine", ["Dataset004_Hippocampus"], trainers, seeds=[1, 2, 3])
        >>> study.reference, len(list(study.runs())), next(study.runs()).trainer
        ('nnUNetTrainerSGD', 30, 'nnUNetTrainerSGD_seed1')
    """

    name: _StudyName
    datasets: _Unique[Annotated[_FolderName, BeforeValidator(_as_text)]]
    trainers: Annotated[
        tuple[Annotated[TrainerEntry, BeforeValidator(_as_entry)], ...],
        BeforeValidator(_as_tuple, json_schema_input_type=str | list[str | TrainerEntry]),
        _NOT_EMPTY,
    ]
    reference: _Text = ""
    folds: Annotated[_Unique[_Fold], _NOT_EMPTY, _numbers("fold")] = (0, 1, 2, 3, 4)
    configurations: Annotated[_Unique[_FolderName], _NOT_EMPTY] = ("3d_fullres",)
    plans: Annotated[_Unique[_FolderName], _NOT_EMPTY] = ("nnUNetPlans",)
    source: _Text = ""
    seeds: Annotated[_Unique[_Seed], _numbers("seed")] = ()
    metrics: Annotated[_Unique[_Metric], _NOT_EMPTY] = ("dice",)
    tolerance: _Distance = DEFAULT_TOLERANCE
    margin: Annotated[
        dict[_Metric, _Margin],
        BeforeValidator(_as_margins, json_schema_input_type=float | dict[_Metric, _Margin]),
    ] = Field(default_factory=lambda: _as_margins(DEFAULT_MARGIN))
    non_inferior_to: _Text = ""
    select: StrictBool = False

    def __post_init__(self) -> None:
        names = [entry.trainer for entry in self.trainers]
        labels = [entry.full_title for entry in self.trainers]
        for kind, values in (("trainer", names), ("label", labels)):
            name, count = Counter(values).most_common(1)[0]
            if count > 1:
                raise ValueError(f"trainers: expected each {kind} once, got {name[:80]} {count} times")
        for key, default in (("reference", names[0]), ("non_inferior_to", self.reference or names[0])):
            if not getattr(self, key):
                object.__setattr__(self, key, default)
            if (name := getattr(self, key)) not in names:
                raise ValueError(f"{key}: expected one of the trainers, got {_shown(name)}")
        object.__setattr__(self, "margin", {**_as_margins(DEFAULT_MARGIN), **self.margin})
        if self.select and any(not entry.group for entry in self.trainers):
            raise ValueError("select: expected a group for each trainer, the method of its settings")
        if self.select and len(self.folds) < 2:
            raise ValueError("select: expected at least 2 folds, as settings are selected on the others")

    def runs(self) -> Iterator[Run]:
        """Return all runs, seed by seed and fold by fold, so that early results compare all trainers."""
        settings = product(self.datasets, self.configurations, self.plans)
        for setting, seed, fold, entry in product(
            settings, self.seeds or (None,), self.folds, self.trainers
        ):
            yield self.run(*setting, fold, entry.trainer, seed)

    def run(
        self, dataset: str, configuration: str, plans: str, fold: int, entry: str, seed: int | None
    ) -> Run:
        """Return a run of one of the trainers."""
        trainer = entry if seed is None else with_seed(entry, seed)
        return Run(dataset, configuration, plans, fold, trainer, entry, seed)

    def entry(self, trainer: str) -> TrainerEntry:
        """Return the entry of a trainer."""
        return next(entry for entry in self.trainers if entry.trainer == trainer)

    def lost_from(self, earlier: Study) -> list[str]:
        """Return the entries of an earlier study that have values which this one has not."""
        entries = ("datasets", "configurations", "plans")
        lost = [key for key in entries if set(getattr(earlier, key)) - set(getattr(self, key))]
        ours = {entry.trainer for entry in self.trainers}
        has_all = ours.issuperset(entry.trainer for entry in earlier.trainers)
        return lost if has_all else ["trainers", *lost]

    def changed(self, **values: Any) -> Study:
        """Return a copy in which the values that are not empty replace the study's own.

        Raises:
            StudyError: a value is invalid.
        """
        try:
            return replace(self, **{key: value for key, value in values.items() if value})
        except pydantic.ValidationError as error:
            raise StudyError(_first_error(error, self.name)) from None


def load(name: str) -> Study:
    """Return the study of a YAML file or preset.

    Args:
        name: path of a file, or name of a preset.

    Raises:
        StudyError: the file does not exist or is invalid.

    Example:
        >>> load("quick").folds
        (0,)
    """
    path = find_study(name)
    content = path.read_bytes()
    try:
        document = yaml.load(content, _UniqueKeyLoader)
    except Exception as error:  # PyYAML raises errors of any kind for a value that its tag does not fit
        text = " ".join(str(error).split())
        raise StudyError(f"{path}: expected YAML, got: {_shorten(text, 1000)}") from error
    if not isinstance(document, dict):
        raise StudyError(f"{path}: expected a mapping with datasets and trainers")
    try:
        return _STUDY.validate_python({"name": path.stem, "datasets": (), **document})
    except pydantic.ValidationError as error:
        raise StudyError(_first_error(error, str(path))) from None


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of study files, in which the name and the data sets may be left out."""
    schema = _STUDY.json_schema()
    return {**schema, "required": ["trainers"]}


def save(study: Study, path: Path) -> None:
    """Write a study as a file that :func:`load` reads."""
    document = asdict(study)
    document["trainers"] = [{k: v for k, v in entry.items() if v} for entry in document["trainers"]]
    with atomic_write(path) as temporary:
        temporary.write_text(yaml.safe_dump(document, sort_keys=False))


def preset_names() -> list[str]:
    """Return the names of the studies that come with the package.

    Example:
        >>> "btcv" in preset_names()
        True
    """
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def saved_files(studies: Path) -> dict[str, Path]:
    """Return the definitions of the studies that have been run, by name.

    Args:
        studies: ``nnUNet_results/studies``.
    """
    return {path.parent.name: path for path in sorted(studies.glob("*/study.yaml"))}


def find_study(given: str, studies: Path | None = None, saved_first: bool = False) -> Path:
    """Return the YAML file of a study.

    Args:
        given: path of a file, name of a study that has been run, or name of a preset.
        studies: ``nnUNet_results/studies``; without it, studies that have been run are not found.
        saved_first: prefer a study that has been run to a preset of the same name.

    Raises:
        StudyError: there is none; the message lists the names.
    """
    presets = {name: PRESETS / f"{name}.yaml" for name in preset_names()}
    saved = {} if studies is None else saved_files(studies)
    known = presets | saved if saved_first else saved | presets
    file = Path(given) if Path(given).is_file() else known.get(given)
    if file is None:
        raise StudyError(
            f"study {given!r}: expected a file, a study in nnUNet_results/studies or a preset; choose "
            f"from {', '.join([*saved, *presets])}"
        )
    return file


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        counts = Counter(key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode))
        for key, count in counts.items():
            if count > 1:
                message = f"duplicate key {_shown(key)}"
                raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Return 17 for 017, the number in Dataset017_BTCV, which is octal in YAML 1.1."""
        text = self.construct_scalar(node)
        return int(text) if re.fullmatch("0[0-9]{1,8}", text) else super().construct_yaml_int(node)


_UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", _UniqueKeyLoader.construct_yaml_int)


_STUDY: pydantic.TypeAdapter[Study] = pydantic.TypeAdapter(Study)


def _first_error(error: pydantic.ValidationError, where: str) -> str:
    """Return the first error as ``<file>: <entry>: expected X, got Y``."""
    errors = error.errors(include_url=False)
    # A misspelt entry explains a missing one.
    first = min(errors, key=lambda each: each["type"] != "unexpected_keyword_argument")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    place = _shorten(place.removeprefix("."))
    if first["type"] == "unexpected_keyword_argument":
        kind = Study if len(first["loc"]) == 1 else TrainerEntry
        names = [field.name for field in fields(kind)]
        return f"{where}: unknown entry {place!r}; choose from {', '.join(nearest_first(place, names))}"
    if first["type"] == "missing":
        return f"{where}: {place}: expected this entry, got none"
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    message = re.sub("expected (greater|less)", r"expected a number \1", message)
    if not place:  # the message of Study.__post_init__ names the entry
        return f"{where}: {message}"
    if "instance of TrainerEntry" in message:
        message = "expected a class name or a mapping with 'trainer'"
    return f"{where}: {place}: {message}, got {_shown(first['input'])}"


def _shown(value: Any) -> str:
    return _shorten(repr(value) if isinstance(value, str) else reprlib.repr(value))


def _shorten(text: str, longest: int = 80) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
