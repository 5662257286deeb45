"""Study files: the data sets, trainers and folds that a study compares."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr

from nnunet_cpr._files import atomic_write

PRESETS = Path(__file__).parent / "presets"
_LONGEST_KEY = 200
"""Bytes of a run's key; with the suffix of a log or temporary file a file name can have 255."""


class StudyError(ValueError):
    """Invalid study; the message is one line of at most ``longest`` characters."""

    def __init__(self, message: str, longest: int = 1000) -> None:
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= longest else f"{line[: longest - 3]}...")


@dataclass(frozen=True)
class Run:
    """One training and its validation.

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

    @property
    def key(self) -> str:
        """Unique name for the run's files."""
        return f"{self.dataset}__{self.trainer}__{self.plans}__{self.configuration}__fold_{self.fold}"

    def folder(self, results: Path) -> Path:
        """Return nnU-Net's folder for this run below ``nnUNet_results``."""
        model = f"{self.trainer}__{self.plans}__{self.configuration}"
        return results / self.dataset / model / f"fold_{self.fold}"


# Types of the entries of a study file


def _as_text(value: Any) -> Any:
    """Return a scalar as one line of text, and anything else as it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return " ".join(str(value).split()) if isinstance(value, str) or is_number else value


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected printable text")
    return text


def _class_name(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("expected the class name of a trainer")
    return text


def _folder_name(text: str) -> str:
    # A name that starts with a dash would be an option of nnU-Net's commands.
    if not re.fullmatch(r"\w[\w .+-]*", text):
        raise ValueError("expected a name of letters, digits, blanks and '_', '-', '.', '+'")
    return text


def _as_dataset(value: Any) -> Any:
    """Return the number of a data set as text, and anything else as it is."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number and 0 <= value < 10**9 else value


def _study_name(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+", text) or not text.strip("."):
        raise ValueError("expected a name of letters, digits, '_', '-' and '.'")
    return text


def _as_tuple(value: Any) -> Any:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("expected each value once")
    return values


def _not_empty(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("expected at least one value")
    return values


_Text = Annotated[StrictStr, BeforeValidator(_as_text), AfterValidator(_printable)]
_FolderName = Annotated[StrictStr, AfterValidator(_folder_name)]
_FolderNames = Annotated[tuple[_FolderName, ...], BeforeValidator(_as_tuple), AfterValidator(_unique)]
_Datasets = Annotated[
    tuple[Annotated[_FolderName, BeforeValidator(_as_dataset)], ...],
    BeforeValidator(_as_tuple),
    AfterValidator(_unique),
]
_Fold = Annotated[StrictInt, Field(ge=0, lt=10**6)]
_Percent = Annotated[float, Field(strict=True, ge=0, le=100)]


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainerEntry:
    """One trainer of a study.

    Attributes:
        trainer: class name of any trainer that nnU-Net finds.
        label: name in tables; the class name if empty.
        group: heading shared with other trainers, such as the name of an optimizer.
        published: published mean foreground Dice in percent by data set.
    """

    trainer: Annotated[StrictStr, AfterValidator(_class_name)]
    label: _Text = ""
    group: _Text = ""
    published: Annotated[dict[_FolderName, _Percent], BeforeValidator(lambda value: value or {})] = (
        Field(default_factory=dict)
    )

    @property
    def title(self) -> str:
        """Name in tables."""
        return self.label or self.trainer


def _as_entry(value: Any) -> Any:
    return {"trainer": value} if isinstance(value, str) else value


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Study:
    """Data sets x configurations x plans x trainers x folds.

    Attributes:
        name: name of the study's folder.
        datasets: nnU-Net's names, ``DatasetXXX_Name``, or numbers, which the command replaces by them.
        trainers: the trainers to compare.
        reference: class name of the trainer that the others are compared with; the first if empty.
        folds: numbers of the folds.
        configurations: nnU-Net's names, such as ``3d_fullres``.
        plans: nnU-Net's names, such as ``nnUNetPlans``.
        source: origin of the published numbers.

    Example:
        >>> study = Study("mine", ["Dataset004_Hippocampus"], ["nnUNetTrainer", "nnUNetTrainerCPR"])
        >>> study.reference, len(list(study.runs()))
        ('nnUNetTrainer', 10)
    """

    name: Annotated[_Text, AfterValidator(_study_name)]
    datasets: _Datasets
    trainers: Annotated[
        tuple[Annotated[TrainerEntry, BeforeValidator(_as_entry)], ...],
        BeforeValidator(_as_tuple),
        AfterValidator(_not_empty),
    ]
    reference: _Text = ""
    folds: Annotated[
        tuple[_Fold, ...],
        BeforeValidator(_as_tuple),
        AfterValidator(_unique),
        AfterValidator(_not_empty),
    ] = (0, 1, 2, 3, 4)
    configurations: Annotated[_FolderNames, AfterValidator(_not_empty)] = ("3d_fullres",)
    plans: Annotated[_FolderNames, AfterValidator(_not_empty)] = ("nnUNetPlans",)
    source: _Text = ""

    def __post_init__(self) -> None:
        names = [entry.trainer for entry in self.trainers]
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"trainers: expected each trainer once, got {name} {count} times")
        if not self.reference:
            object.__setattr__(self, "reference", names[0])
        if self.reference not in names:
            raise ValueError(f"reference: expected one of the trainers, got {_shown(self.reference)}")
        for run in self.runs():
            if (length := len(run.key.encode())) > _LONGEST_KEY:
                raise ValueError(
                    f"{_shown(run.key)}: expected at most {_LONGEST_KEY} bytes, got {length}; "
                    "shorten the names, as files are named after them"
                )

    def runs(self) -> Iterator[Run]:
        """Return all runs, fold by fold, so that early results compare all trainers."""
        for dataset, configuration, plans, fold, entry in product(
            self.datasets, self.configurations, self.plans, self.folds, self.trainers
        ):
            yield Run(dataset, configuration, plans, fold, entry.trainer)

    def entry(self, trainer: str) -> TrainerEntry:
        """Return the entry of a trainer."""
        return next(entry for entry in self.trainers if entry.trainer == trainer)

    def changed(
        self,
        name: str = "",
        datasets: Sequence[str] = (),
        folds: Sequence[int] = (),
        configurations: Sequence[str] = (),
        plans: Sequence[str] = (),
    ) -> Study:
        """Return a copy in which the arguments that are not empty replace the study's own values.

        Raises:
            StudyError: a value is invalid.
        """
        given: dict[str, Any] = {
            "name": name,
            "datasets": datasets,
            "folds": folds,
            "configurations": configurations,
            "plans": plans,
        }
        try:
            return replace(self, **{key: value for key, value in given.items() if value})
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
    path = Path(name)
    if not path.is_file():
        path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        raise StudyError(
            f"study {name!r}: expected a file or a preset; choose from {', '.join(preset_names())}"
        )
    try:
        document = yaml.load(path.read_bytes(), _UniqueKeyLoader)
    # PyYAML raises errors of any kind for a value that its tag does not fit.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise StudyError(f"{path}: expected YAML, got: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise StudyError(f"{path}: nested too deeply") from error
    if not isinstance(document, dict):
        raise StudyError(f"{path}: expected a mapping with datasets and trainers")
    try:
        return _STUDY.validate_python({"name": path.stem, "datasets": (), **document})
    except pydantic.ValidationError as error:
        raise StudyError(_first_error(error, str(path))) from None


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


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
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
        return f"{where}: unknown entry {place!r}; choose from {', '.join(f.name for f in fields(kind))}"
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
    try:
        return _shorten(repr(value) if isinstance(value, str) else reprlib.repr(value))
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number that is too large"


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
