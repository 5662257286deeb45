from .cascades import prerequisites
from .data import (
    check_splits,
    check_study_data,
    dataset_name,
    nnunet_folders,
    notes,
    prepare_study_data,
    seen_cases,
)
from .local_and_slurm import Local, Slurm, cancel_slurm_jobs, command_line
from .prediction import Ensemble, predict, select_ensemble
from .state import Stage, StudyPaths, cases_of_fold, finished, running_command, stop_command
from .status import dry_run_lines, states, status_table, steps_summary, summary, time_left, timed_steps
from .study import Run, Study, TrainerEntry
from .study_file import PRESETS, find_study, json_schema, load, preset_names, save, saved_files
from .worker import Worker

__all__ = [
    "PRESETS",
    "Ensemble",
    "Local",
    "Run",
    "Slurm",
    "Stage",
    "Study",
    "StudyPaths",
    "TrainerEntry",
    "Worker",
    "cancel_slurm_jobs",
    "cases_of_fold",
    "check_splits",
    "check_study_data",
    "command_line",
    "dataset_name",
    "dry_run_lines",
    "find_study",
    "finished",
    "json_schema",
    "load",
    "nnunet_folders",
    "notes",
    "predict",
    "prepare_study_data",
    "prerequisites",
    "preset_names",
    "running_command",
    "save",
    "saved_files",
    "seen_cases",
    "select_ensemble",
    "states",
    "status_table",
    "steps_summary",
    "stop_command",
    "summary",
    "time_left",
    "timed_steps",
]
