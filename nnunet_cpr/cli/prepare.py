"""``nnunet-cpr prepare``: convert a challenge archive, or other images, to nnU-Net's raw format."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Argument, Option

from nnunet_cpr import studies
from nnunet_cpr.cli.options import DEFAULT_PROCESSES, ProcessesOption
from nnunet_cpr.refusals import Refusal

if TYPE_CHECKING:
    from nnunet_cpr.datasets.archive import DataSet

FOLDER, PLANS = "folder", "plans"


def prepare(
    dataset: Annotated[
        str, Argument(help="btcv, heart, brats2020, amos22, hippocampus, folder or plans.")
    ],
    source: Annotated[
        Path, Argument(help="Folder of the archive, images of `folder`, or data set of `plans`.")
    ],
    labels: Annotated[
        Path | None, Argument(help="Segmentations of `folder`; both a folder or a pattern in quotes.")
    ] = None,
    dataset_id: Annotated[int | None, Option(min=1, max=999, help="Another dataset id.")] = None,
    name: Annotated[str | None, Option(help="Another name after DatasetXXX_.")] = None,
    processes: ProcessesOption = DEFAULT_PROCESSES,
    channels: Annotated[
        str | None, Option(help="Channels of `folder`, such as CT, or T1,T2, or CT=CTres,PET=SUV.")
    ] = None,
    label_names: Annotated[str | None, Option(help="Names of the values above 0 of `folder`.")] = None,
    write: Annotated[bool, Option("--write", help="Write the data set that `folder` shows.")] = False,
    match: Annotated[
        str | None, Option(help="Part of the paths of `folder` that names the case, such as p[0-9]+.")
    ] = None,
    show_all: Annotated[bool, Option("--all", help="Show all cases and files of `folder`.")] = False,
    small: Annotated[
        bool, Option("--small", help="Write smaller `plans`, for a CPU or a first try.")
    ] = False,
) -> None:
    """Check images of your own or a challenge's archive, and convert them to a data set in nnUNet_raw.

    `prepare folder IMAGES LABELS --name Liver` does so with NIfTI, NRRD, MHA, DICOM and other images.
    `prepare plans 4 --small` writes plans with a smaller network, nnUNetPlansSmall, to train with -p.
    """
    if dataset == PLANS or small:
        return _prepare_plans(dataset, str(source), small)
    from nnunet_cpr.datasets.archive import check_cases
    from nnunet_cpr.datasets.challenges import DATA_SETS, refuse_used_id
    from nnunet_cpr.datasets.own_folder import OwnFolder
    from nnunet_cpr.files import add_path_to_os_errors, atomic_directory

    if dataset not in (*DATA_SETS, FOLDER):
        choices = ", ".join([*DATA_SETS, FOLDER, PLANS])
        raise Refusal(f"unknown data set {dataset!r}", f"choose from {choices}")
    if name is not None and not re.fullmatch(r"\w[\w-]*", name):
        raise Refusal(f"--name: expected letters, digits, '_' and '-', got {name!r}")
    data_set = DATA_SETS.get(dataset) or _own_folder(
        labels, name, channels, label_names, match, show_all
    )
    if dataset != FOLDER and any((labels, channels, label_names, write, match, show_all)):
        options = "LABELS, --channels, --label-names, --match, --all or --write"
        raise Refusal(f"{dataset}: expected no {options}", "leave them out")
    if write and not channels:
        raise Refusal(
            "--channels: expected their names, as nnU-Net normalizes CT in another way than all others"
        )
    number = dataset_id or data_set.number
    raw = Path(studies.nnunet_folders(os.environ, ["nnUNet_raw"])["nnUNet_raw"])
    if not raw.is_dir():
        raise Refusal(f"nnUNet_raw: {raw} does not exist", f"run: mkdir -p {shlex.quote(str(raw))}")
    target = raw / f"Dataset{number:03d}_{name or data_set.name}"
    refuse_used_id(target)
    archive = data_set.open(source)
    checked = check_cases(archive, processes)
    problems = [each.problem for each in checked if each.problem]
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise Refusal(
            f"{archive.folder}: invalid cases: {len(problems)}, see above", "nothing was written"
        )
    if isinstance(data_set, OwnFolder):
        for part in data_set.describe(archive, checked):
            Console(markup=False, highlight=False).print(part, soft_wrap=isinstance(part, str))
        data_set.name_labels(checked)
        print(*data_set.describe_names(), sep="\n")
        if not write:
            print(f"{target}: {len(checked)} cases would be written; add --channels and --write")
            return
    with add_path_to_os_errors(target), atomic_directory(target) as folder:
        data_set.write(archive, folder, processes)
    print(f"{target}: {len(archive.cases)} cases. Next:")
    print(f"  nnUNetv2_plan_and_preprocess -d {number} --verify_dataset_integrity")
    study = dataset if dataset != FOLDER else "--trainers nnUNetTrainerSGD,nnUNetTrainerCPR --seeds 1-3"
    print(f"  nnunet-cpr study run {study} --dataset {target.name}")


def _prepare_plans(dataset: str, source: str, small: bool) -> None:
    """Write small plans beside nnU-Net's own."""
    from nnunet_cpr.datasets.small_plans import write_small_plans

    if dataset != PLANS or not small:
        raise Refusal("plans: expected `plans DATASET --small`, as there are no other ones")
    folders = studies.nnunet_folders(os.environ, ["nnUNet_preprocessed"])
    name = studies.dataset_name(source, folders)
    folder = Path(folders["nnUNet_preprocessed"]) / name
    changed = write_small_plans(folder, "nnUNetPlans", "nnUNetPlansSmall")
    print(f"{folder / 'nnUNetPlansSmall.json'}: {', '.join(changed)}. Next:")
    print(f"  nnUNetv2_train {name} {changed[-1]} 0 -tr nnUNetTrainerCPR_10epochs -p nnUNetPlansSmall")


def _own_folder(
    labels: Path | None,
    name: str | None,
    channels: str | None,
    label_names: str | None,
    match: str | None,
    show_all: bool,
) -> DataSet:
    from nnunet_cpr.datasets.own_folder import OwnFolder

    if labels is None or name is None:
        raise Refusal("folder: expected IMAGES LABELS --name NAME, such as ct masks --name Liver")
    try:
        re.compile(match or "")
    except re.error as error:
        raise Refusal(f"--match: expected a regular expression, got {match!r} ({error})") from error
    parts = [each.partition("=") for each in _split(channels)]
    if not all(channel for channel, _, _ in parts):
        raise Refusal(f"--channels: expected names such as CT, or T1,T2, or CT=CTres, got {channels!r}")
    named = [(channel, ending or channel) for channel, _, ending in parts]
    return OwnFolder(labels, name, named, _split(label_names), match, show_all)


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []
