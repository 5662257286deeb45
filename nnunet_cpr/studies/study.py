"""Studies: the data sets, trainers, folds and seeds that are compared; the types of their entries."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from nnunet_cpr.names.trainer_name import with_pretrained
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.spelling import with_suffix
from nnunet_cpr.yaml_files import Scalar, first_error, number_ranges, shown

SURFACE_METRICS = ("hd95", "nsd")
"""Metrics of predictions and ground truth, for which MONAI is needed."""
METRIC_NAMES = ("dice", *SURFACE_METRICS)
"""Names of :data:`nnunet_cpr.reports.metrics.METRICS`."""
_T = TypeVar("_T")


def _check(is_valid: Callable[[Any], Any], expected: str) -> AfterValidator:
    """Return a validator that refuses values with an error such as "expected printable text"."""

    def validate(value: _T) -> _T:
        if not is_valid(value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(validate)


def _check_name(pattern: str, characters: str) -> AfterValidator:
    return _check(re.compile(pattern).fullmatch, f"a name of {characters}")


def as_text(value: Any) -> Any:
    """Return text and numbers as one line of text, an empty entry as "", and anything else as it is."""
    if value is None:
        return ""
    is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    return " ".join(str(value).split()) if is_scalar else value


def _as_number(value: Any) -> Any:
    """Return text such as 1e-1, which is no number in YAML 1.1, as a number."""
    is_number = isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?e[-+]?\d+", value, re.IGNORECASE)
    return float(value) if is_number else value


def as_margins(value: Any) -> Any:
    """Return a number as the margin of each metric."""
    return value if isinstance(value, dict) else dict.fromkeys(METRIC_NAMES, value)


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, an empty entry as an empty one, and a value as a tuple of one."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


NOT_EMPTY = _check(len, "at least one value")
Unique = Annotated[
    tuple[_T, ...],
    BeforeValidator(as_tuple, json_schema_input_type=Scalar | list[Scalar] | None),
    _check(lambda values: len(set(values)) == len(values), "each value once"),
]
Text = Annotated[
    StrictStr,
    BeforeValidator(as_text, json_schema_input_type=Scalar | None),
    _check(str.isprintable, "printable text"),
]
ClassName = Annotated[StrictStr, _check(str.isidentifier, "the class name of a trainer")]
# A name that starts with a dash would be an option of nnU-Net's commands.
FolderName = Annotated[
    StrictStr, _check_name(r"\w[\w .+-]*", "letters, digits, blanks and '_', '-', '.', '+'")
]
StudyName = Annotated[
    Text, _check_name(r"(?!-)(?!\.*$)[\w.-]+", "letters, digits, '_', '-' and '.', not '-' first")
]
Fold = Annotated[StrictInt, Field(ge=0, lt=10**6)]
Seed = Annotated[StrictInt, Field(ge=0, lt=10**9)]
Number = Annotated[float, BeforeValidator(_as_number, json_schema_input_type=float), Field(strict=True)]
Percent = Annotated[Number, Field(ge=0, le=100)]
Metric = Annotated[StrictStr, _check(METRIC_NAMES.__contains__, f"one of {', '.join(METRIC_NAMES)}")]
Distance = Annotated[Number, Field(gt=0, le=1000)]
Margin = Annotated[Number, Field(gt=0, le=100)]


DEFAULT_MARGIN = 0.1
"""Points of Dice or NSD, or mm of HD95."""
DEFAULT_TOLERANCE = 2.0
"""Tolerance of the NSD in mm."""


@dataclass(frozen=True)
class Run:
    """One training and its validation.

    Attributes:
        trainer: class name that nnU-Net trains, with ``_seed<N>`` if the study has seeds.
        pretrained: checkpoint with which the training begins; empty for random weights.
        entry: key of the trainer in the study, without the seed; ``trainer`` if empty.
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
    pretrained: str = ""

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

    def weights(self, results: Path) -> Path | None:
        """Return the checkpoint with which the training begins, None for random weights."""
        return results / Path(self.pretrained).expanduser() if self.pretrained else None


def _not_left_out(value: Any) -> Any:
    """Refuse an entry without a value, which would train from random weights."""
    if value is None:
        raise ValueError("expected a checkpoint")
    return value


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainerEntry:
    """One trainer of a study.

    Attributes:
        trainer: class name of any trainer that nnU-Net finds.
        label: name in tables; the key if empty.
        group: heading shared with other trainers, such as the name of an optimizer.
        published: published mean foreground Dice in percent by data set.
        plans: its own plans, in place of the study's.
        configuration: its own configuration, in place of the study's.
        pretrained: checkpoint to begin with, or one of each fold with ``{fold}``; relative paths are in
            ``nnUNet_results``. The trainer gets the suffix ``_pre<Word>``, by default with a hash.
    """

    trainer: ClassName
    label: Text = ""
    group: Text = ""
    published: Annotated[dict[FolderName, Percent], BeforeValidator(lambda value: value or {})] = Field(
        default_factory=dict
    )
    plans: Annotated[FolderName | Literal[""], BeforeValidator(lambda value: value or "")] = ""
    configuration: Annotated[FolderName | Literal[""], BeforeValidator(lambda value: value or "")] = ""
    pretrained: Annotated[Text, BeforeValidator(_not_left_out)] = ""

    @property
    def trained(self) -> str:
        """Class name that nnU-Net trains, without the seed."""
        return with_pretrained(self.trainer, self.pretrained) if self.pretrained else self.trainer

    @property
    def key(self) -> str:
        """Identity of the setting: trainer, pretrained weights, own plans and configuration.

        Example:
            >>> TrainerEntry("nnUNetTrainer", plans="nnUNetResEncUNetMPlans").key
            'nnUNetTrainer, nnUNetResEncUNetMPlans'
        """
        return ", ".join(filter(None, (self.trained, self.plans, self.configuration)))

    @property
    def title(self) -> str:
        """Name in tables."""
        return self.label or self.key

    @property
    def full_title(self) -> str:
        """Group and title; a label such as "1e-3" is not clear without its group."""
        return f"{self.group} {self.title}" if self.group else self.title


def _as_entry(value: Any) -> Any:
    """Return a class name as an entry of a trainer."""
    if not isinstance(value, str | dict | TrainerEntry):
        raise ValueError("expected a class name or a mapping with 'trainer'")
    return {"trainer": value} if isinstance(value, str) else value


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Study:
    """Data sets x configurations x plans x folds x seeds x trainers.

    Attributes:
        name: name of the study's folder.
        datasets: nnU-Net's names, ``DatasetXXX_Name``, or numbers, which the command replaces by them.
        trainers: the trainers to compare.
        reference: the trainer that the others are compared with, by its class name, label or key; the
            first if empty.
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
        non_inferior_to: the trainer that the others are tested not to be worse than by more than the
            margin, as ``reference``; the reference if empty.
        select: compare the best setting of each group, selected on the other folds, in place of all
            settings.

    Example:
        >>> trainers = ["nnUNetTrainerSGD", "nnUNetTrainerCPR"]
        >>> study = Study("mine", ["Dataset004_Hippocampus"], trainers, seeds=[1, 2, 3])
        >>> study.reference, len(list(study.runs())), next(study.runs()).trainer
        ('nnUNetTrainerSGD', 30, 'nnUNetTrainerSGD_seed1')
    """

    name: StudyName
    datasets: Unique[Annotated[FolderName, BeforeValidator(as_text)]]
    trainers: Annotated[
        tuple[Annotated[TrainerEntry, BeforeValidator(_as_entry)], ...],
        BeforeValidator(as_tuple, json_schema_input_type=str | list[str | TrainerEntry]),
        NOT_EMPTY,
    ]
    reference: Text = ""
    folds: Annotated[Unique[Fold], NOT_EMPTY, number_ranges("fold")] = (0, 1, 2, 3, 4)
    configurations: Annotated[Unique[FolderName], NOT_EMPTY] = ("3d_fullres",)
    plans: Annotated[Unique[FolderName], NOT_EMPTY] = ("nnUNetPlans",)
    source: Text = ""
    seeds: Annotated[Unique[Seed], number_ranges("seed")] = ()
    metrics: Annotated[Unique[Metric], NOT_EMPTY] = ("dice",)
    tolerance: Distance = DEFAULT_TOLERANCE
    margin: Annotated[
        dict[Metric, Margin],
        BeforeValidator(as_margins, json_schema_input_type=float | dict[Metric, Margin]),
    ] = Field(default_factory=lambda: as_margins(DEFAULT_MARGIN))
    non_inferior_to: Text = ""
    select: StrictBool = False

    def __post_init__(self) -> None:
        keys = [entry.key for entry in self.trainers]
        labels = [entry.full_title for entry in self.trainers]
        for kind, values in (("trainer", keys), ("label", labels)):
            name, count = Counter(values).most_common(1)[0]
            if count > 1:
                raise ValueError(f"trainers: expected each {kind} once, got {name[:80]} {count} times")
        object.__setattr__(self, "reference", self._find("reference", keys[0]))
        object.__setattr__(self, "non_inferior_to", self._find("non_inferior_to", self.reference))
        for key, own in (("plans", "plans"), ("configurations", "configuration")):
            if len(getattr(self, key)) > 1 and any(getattr(entry, own) for entry in self.trainers):
                raise ValueError(f"{key}: expected one beside a trainer with its own {own}, got several")
        shared = self.plans[0], self.configurations[0]
        places = [(e.trained, e.plans or shared[0], e.configuration or shared[1]) for e in self.trainers]
        place, count = Counter(places).most_common(1)[0]
        if count > 1:
            name = ", ".join(place)
            raise ValueError(f"trainers: expected each training once, got {name} {count} times")
        object.__setattr__(self, "margin", {**as_margins(DEFAULT_MARGIN), **self.margin})
        if self.select and any(not entry.group for entry in self.trainers):
            raise ValueError("select: expected a group for each trainer, the method of its settings")
        if self.select and len(self.folds) < 2:
            raise ValueError("select: expected at least 2 folds, as settings are selected on the others")

    def _find(self, key: str, default: str) -> str:
        """Return the key of the entry that a field names."""
        return self.find_trainer(key, getattr(self, key) or default)

    def find_trainer(self, what: str, given: str) -> str:
        """Return the key of the entry with a key, label or class name.

        Args:
            what: field or option with the name, for the error.
            given: the name.

        Raises:
            ValueError: no entry or several have it.

        Example:
            >>> study = Study("mine", [], [{"trainer": "nnUNetTrainerCPR", "label": "CPR"}])
            >>> study.find_trainer("--setting", "CPR")
            'nnUNetTrainerCPR'
        """
        for kind in ("key", "full_title", "title", "trainer"):
            found = [entry for entry in self.trainers if getattr(entry, kind) == given]
            if len(found) == 1:
                return found[0].key
            if found:
                break
        one = "one trainer" if found else "one of the trainers"
        choices = "; ".join(entry.full_title for entry in found or self.trainers)
        raise ValueError(f"{what}: expected {one}, got {shown(given)}; choose from {choices}")

    @property
    def conditions(self) -> list[tuple[str, str, str]]:
        """Data set, configuration and plans of each comparison; an entry's own come in their place."""
        return list(product(self.datasets, self.configurations, self.plans))

    @property
    def used_plans(self) -> dict[str, list[str]]:
        """Configurations of each plans that a run has."""
        used: dict[str, list[str]] = {}
        for configuration, plans, entry in product(self.configurations, self.plans, self.trainers):
            own = used.setdefault(entry.plans or plans, [])
            if (name := entry.configuration or configuration) not in own:
                own.append(name)
        return used

    def runs(self) -> Iterator[Run]:
        """Return all runs, seed by seed and fold by fold, so that early results compare all trainers."""
        for _, run in self.runs_by_condition():
            yield run

    def runs_by_condition(self) -> Iterator[tuple[tuple[str, str, str], Run]]:
        """Return each run with the data set, configuration and plans of its comparison."""
        seeds = self.seeds or (None,)
        for condition, seed, fold, entry in product(self.conditions, seeds, self.folds, self.trainers):
            yield condition, self.run(*condition, fold, entry.key, seed)

    def run(
        self, dataset: str, configuration: str, plans: str, fold: int, key: str, seed: int | None
    ) -> Run:
        """Return a run of one of the trainers, by the key of its entry."""
        entry = self.entry(key)
        trainer = entry.trained if seed is None else with_suffix(entry.trained, f"_seed{seed}")
        own = entry.configuration or configuration, entry.plans or plans
        weights = entry.pretrained.replace("{fold}", str(fold))
        return Run(dataset, *own, fold, trainer, key, seed, weights)

    def entry(self, key: str) -> TrainerEntry:
        """Return the entry with a key."""
        return next(entry for entry in self.trainers if entry.key == key)

    def grown_from(self, earlier: Study) -> Study:
        """Return this study with the folds and seeds of an earlier one, too.

        Raises:
            Refusal: the earlier one has runs that this study would not have.

        Example:
            >>> first = Study("mine", ["Dataset004_Hippocampus"], ["nnUNetTrainerCPR"], seeds=[1, 2])
            >>> first.changed(seeds=[3]).grown_from(first).seeds
            (1, 2, 3)
        """
        ours, theirs = (
            {
                "trainers": [entry.key for entry in study.trainers],
                "data sets": study.datasets,
                "configurations": study.configurations,
                "plans": study.plans,
                "runs": [f"with seed {seed}" for seed in study.seeds] or ["without seeds"],
            }
            for study in (self, earlier)
        )
        if self.seeds and earlier.seeds:
            ours["runs"] = theirs["runs"]  # which are added
        gone = {kind: [each for each in theirs[kind] if each not in ours[kind]] for kind in theirs}
        lost = [f"{kind} {', '.join(map(str, values))}" for kind, values in gone.items() if values]
        if lost:
            raise Refusal(
                f"study {self.name} exists with {' and '.join(lost)}, which it would lose",
                "choose another --name, or --replace",
            )
        return self.changed(
            folds=sorted({*earlier.folds, *self.folds}), seeds=sorted({*earlier.seeds, *self.seeds})
        )

    def changed(self, **values: Any) -> Study:
        """Return a copy in which the values that are not empty replace the study's own.

        Raises:
            Refusal: a value is invalid.
        """
        try:
            return replace(self, **{key: value for key, value in values.items() if value})
        except pydantic.ValidationError as error:
            raise Refusal(first_error(error, self.name, Study, TrainerEntry)) from None
