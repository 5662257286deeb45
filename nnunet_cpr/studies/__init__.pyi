from .command_lines import command_line
from .definition import PRESETS, Run, Study, StudyError, load, preset_names
from .dry_run import dry_run_lines
from .executors import Local, Slurm, cancel_slurm_jobs
from .lookup import find_study, save_study, saved_file, saved_names
from .preparation import check_study_data, dataset_name, nnunet_folders, prepare_study_data
from .run_state import Stage, StudyPaths, validation_dice
from .status_table import states, status_renderer, summary
from .worker import Worker

__all__ = [
    "PRESETS",
    "Local",
    "Run",
    "Slurm",
    "Stage",
    "Study",
    "StudyError",
    "StudyPaths",
    "Worker",
    "cancel_slurm_jobs",
    "check_study_data",
    "command_line",
    "dataset_name",
    "dry_run_lines",
    "find_study",
    "load",
    "nnunet_folders",
    "prepare_study_data",
    "preset_names",
    "save_study",
    "saved_file",
    "saved_names",
    "states",
    "status_renderer",
    "summary",
    "validation_dice",
]
