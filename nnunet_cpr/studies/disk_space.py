"""Disk space that the results of a study need."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from nnunet_cpr._files import read_json
from nnunet_cpr.studies.definition import Run
from nnunet_cpr.studies.estimates import Measured, folder_bytes
from nnunet_cpr.studies.run_state import parse_trainer

_FINAL_COPIES = 2
"""Checkpoints of a finished run: the final and the best."""
_OPTIMIZER_STATES = {"sgd": 1, "adam": 2, "muon": 1, "amos": 2, "other": 2}
"""Tensors per parameter; Muon keeps two of few parameters, AMOS less than two of all, and other
trainers' optimizers seldom more."""
_BYTES_PER_VALUE = 4


def needed_bytes(
    unfinished: Sequence[Run], jobs: int, results: Path, folders: Mapping[str, str], finished: Measured
) -> tuple[float, int]:
    """Estimate the disk space that the unfinished runs still need.

    While it trains, a run has a third checkpoint.

    Args:
        unfinished: the runs.
        jobs: number of runs that are trained at the same time.
        results: ``nnUNet_results``.
        folders: nnU-Net's folders by the names of their environment variables.
        finished: sizes of finished folds, bytes.

    Returns:
        The bytes, and the number of runs without an estimate.
    """
    needed, sizes = 0.0, []
    for run in unfinished:
        size = finished.typical(run)
        if size is None:
            checkpoint = checkpoint_bytes(run, folders)
            size = None if checkpoint is None else _FINAL_COPIES * checkpoint
        if size is not None:
            sizes.append(size)
            needed += max(0.0, size - folder_bytes(run.folder(results)))
    at_once = sorted(sizes, reverse=True)[:jobs]
    return needed + sum(at_once) / _FINAL_COPIES, len(unfinished) - len(sizes)


def free_bytes(folder: Path) -> int:
    """Return the free disk space of a folder, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def checkpoint_bytes(run: Run, folders: Mapping[str, str]) -> int | None:
    """Return the size of a checkpoint: the parameters and the state of the optimizer.

    Returns:
        The bytes, None if the network cannot be built from the plans.
    """
    home = Path(folders["nnUNet_preprocessed"]) / run.dataset
    parameters = _count_parameters(home, run.plans, run.configuration)
    if parameters is None:
        return None
    ours = parse_trainer(run.trainer)
    states = _OPTIMIZER_STATES[ours.defaults.optimizer] if ours is not None else 2
    return parameters * (1 + states) * _BYTES_PER_VALUE


@lru_cache(maxsize=64)
def _count_parameters(home: Path, plans: str, configuration: str) -> int | None:
    """Build nnU-Net's network without memory for its parameters and count these."""
    import torch
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
    from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    try:
        with (
            torch.device("meta"),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            description = read_json(home / "dataset.json")
            manager = PlansManager(read_json(home / f"{plans}.json"))
            settings = manager.get_configuration(configuration)
            network = get_network_from_plans(
                settings.network_arch_class_name,
                settings.network_arch_init_kwargs,
                settings.network_arch_init_kwargs_req_import,
                determine_num_input_channels(manager, settings, description),
                manager.get_label_manager(description).num_segmentation_heads,
                allow_init=False,
                deep_supervision=True,
            )
    except Exception:  # a network of another package, or damaged plans, can fail in any way
        return None
    return sum(parameter.numel() for parameter in network.parameters())
