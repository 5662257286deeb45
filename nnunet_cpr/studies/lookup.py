"""Studies by name: files, studies that have been run, and presets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from nnunet_cpr.studies.definition import PRESETS, Study, StudyError, load, preset_names, save

_FILE = "study.yaml"


def saved_file(studies: Path, name: str) -> Path:
    """Return the file with the study of this name as it was run.

    Args:
        studies: ``nnUNet_results/studies``.
        name: name of the study.
    """
    return studies / name / _FILE


def saved_names(studies: Path) -> list[str]:
    """Return the names of the studies that have been run."""
    try:
        return sorted(path.parent.name for path in studies.glob(f"*/{_FILE}"))
    except OSError:
        return []


def find_study(given: str, studies: Path, saved_first: bool) -> Path:
    """Return the YAML file of a study.

    Args:
        given: path of a file, name of a study that has been run, or name of a preset.
        studies: ``nnUNet_results/studies``.
        saved_first: prefer a study that has been run to a preset of the same name.

    Raises:
        StudyError: there is none; the message lists the names.
    """
    saved, preset = saved_file(studies, given), PRESETS / f"{given}.yaml"
    is_name = Path(given).name == given and given not in ("", "..")
    candidates = [saved, preset] if saved_first else [preset, saved]
    for path in [Path(given), *(candidates if is_name else [])]:
        if path.is_file():
            return path
    names = ", ".join(saved_names(studies)) or "none"
    raise StudyError(
        f"study {given!r}: expected a file, a study in {studies} ({names}) or a preset; "
        f"choose from {', '.join(preset_names())}"
    )


def save_study(study: Study, folder: Path, is_part: bool) -> None:
    """Save a study that is run, for commands that name it.

    Args:
        study: the study.
        folder: the study's folder.
        is_part: True if the command selects folds or seeds; those that were run before are kept if the
            studies are otherwise equal.
    """
    file = folder / _FILE
    save(_with_earlier_parts(study, file) if is_part else study, file)


def _with_earlier_parts(study: Study, file: Path) -> Study:
    try:
        earlier = load(str(file))
    except (StudyError, OSError):
        return study
    now, before = asdict(study), asdict(earlier)
    different = {key for key in now if now[key] != before[key]}
    if not different <= {"folds", "seeds"} or not all(before[key] for key in different):
        return study
    both = {key: sorted({*now[key], *before[key]}) for key in different}
    return study.changed(folds=both.get("folds", ()), seeds=both.get("seeds", ()))
