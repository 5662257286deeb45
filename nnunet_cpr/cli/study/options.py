"""Options of the commands of ``nnunet-cpr study``, and the study that they select."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from rich.console import Console
from typer import Argument, BadParameter, Option

from nnunet_cpr import studies
from nnunet_cpr.cli.options import DEFAULT_PROCESSES, ProcessesOption, parse_numbers

STOPPED = "stopped; run the same command again to continue from the last checkpoints"


StudyArgument = Annotated[
    str,
    Argument(metavar="STUDY", help="YAML file, preset, or name of a study in nnUNet_results/studies."),
]
NameOption = Annotated[str | None, Option("--name", help="Replace the study's name and folder.")]
DeviceOption = Annotated[
    Literal["cuda", "cpu", "mps"] | None,
    Option("--device", "-device", help="Device to use; by default a GPU if any."),
]
_Values = list[str] | None


class SelectedStudy(NamedTuple):
    """Study with the command's options applied.

    Attributes:
        paths: the study's folders.
        folders: those of nnU-Net's folders that are set, by the names of their environment variables.
    """

    study: studies.Study
    paths: studies.StudyPaths
    folders: dict[str, str]


@dataclass(frozen=True)
class StudyOptions:
    """A study, and what replaces its own values."""

    study: StudyArgument = ""
    dataset: Annotated[_Values, Option("--dataset", "-d", help="Replace the data sets; repeatable.")] = (
        None
    )
    folds: Annotated[
        str | None, Option("--folds", "-f", help="Replace the folds: 0-2, 0,3 or all for 0-4.")
    ] = None
    configuration: Annotated[
        _Values, Option("--configuration", "-c", help="Replace the configurations; repeatable.")
    ] = None
    plans: Annotated[_Values, Option("--plans", "-p", help="Replace the plans; repeatable.")] = None
    seeds: Annotated[str | None, Option(help="Replace the seeds, such as 1-3.")] = None
    name: NameOption = None
    trainers: Annotated[
        str | None,
        Option(
            "--trainers",
            "-tr",
            help="Compare these trainers, such as A,B, in place of the study's; needs no STUDY.",
        ),
    ] = None

    def select(self, saved_first: bool = True) -> SelectedStudy:
        """Return the study that the options select.

        Args:
            saved_first: prefer the study in ``nnUNet_results/studies``, which is what was run, to a
                preset of the same name.

        Raises:
            Refusal: there is no such study, or an option is invalid.
        """
        if not (self.study or self.trainers):
            raise BadParameter("expected STUDY, or --trainers A,B with --dataset")
        folders = studies.nnunet_folders(os.environ, ["nnUNet_results"])
        results = Path(folders["nnUNet_results"])
        study = studies.Study("study", (), (studies.TrainerEntry("nnUNetTrainer"),))
        if self.study:
            file = studies.find_study(self.study, results / "studies", saved_first)
            study = studies.load(str(file), self.name)
        trainers = self.trainers.split(",") if self.trainers else [""]
        study = study.changed(
            name=self.name,
            datasets=self.dataset,
            folds=parse_numbers("--folds", self.folds),
            configurations=self.configuration,
            plans=self.plans,
            trainers=trainers if self.trainers else None,
            reference=trainers[0],
            non_inferior_to=trainers[0],
            seeds=parse_numbers("--seeds", self.seeds),
        )
        names = [studies.dataset_name(dataset, folders) for dataset in study.datasets]
        paths = studies.StudyPaths.of(study.name, folders)
        return SelectedStudy(study.changed(datasets=names), paths, folders)


@dataclass(frozen=True)
class TrainingOptions:
    """Options of nnU-Net's trainings."""

    device: DeviceOption = None
    npz: Annotated[bool, Option("--npz", help="Keep probabilities, for nnU-Net's ensembles.")] = False

    @property
    def nnunet_options(self) -> tuple[str, ...]:
        """Options of ``nnUNetv2_train``."""
        return ("--npz",) if self.npz else ()


@dataclass(frozen=True)
class PreparationOptions(TrainingOptions, StudyOptions):
    """Options of the commands that prepare the data of a study and train it."""

    processes: ProcessesOption = DEFAULT_PROCESSES
    replace: Annotated[
        bool, Option("--replace", help="Replace the definition of an earlier study of this name.")
    ] = False

    def check(self, selected: SelectedStudy) -> list[list[str]]:
        """Check a study without changing a file, and return the commands that prepare its data.

        Raises:
            Refusal: a trainer, a data set, its plans or a fold is missing, or an earlier study of
                this name has runs that this one has not, and is not to be replaced.
        """
        study, _, folders = selected
        study.grown_from(self._earlier(selected))
        commands = studies.check_study_data(study, folders, self.processes)
        studies.prerequisites(study, folders)
        return commands

    def prepare(self, selected: SelectedStudy, console: Console) -> None:
        """Check a study, plan and preprocess its data, and save it for commands that name it.

        Raises:
            Refusal: as :meth:`check`, the folds have changed since the study began, or nnU-Net's
                planning or preprocessing failed.
        """
        study, paths, folders = selected
        with console.status("checking the trainers and data sets, then planning and preprocessing"):
            self.check(selected)
            paths.logs.mkdir(parents=True, exist_ok=True)
            studies.prepare_study_data(study, folders, paths.logs, self.processes)
        studies.check_splits(study, folders, paths.splits)
        for note in (*studies.notes(study), *studies.seen_cases(study, paths)):
            print(f"nnunet-cpr: warning: {note}", file=sys.stderr)
        studies.save(study.grown_from(self._earlier(selected)), paths.file)

    def _earlier(self, selected: SelectedStudy) -> studies.Study:
        """Return the study of this name that was run before and is not to be replaced, or this one."""
        study, paths, _ = selected
        return study if self.replace or not paths.file.exists() else studies.load(str(paths.file))
