"""Sweeps: the runs of a table and a figure, in a YAML file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import ConfigDict, Field

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import RunName, parse_run_name
from nnunet_cpr.vision.task import CannotTrain
from nnunet_cpr.yaml_files import number_ranges, read_yaml


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Sweep:
    """Runs of one task with several methods, settings and seeds.

    Attributes:
        task: name of the task.
        methods: names of the runs without a seed, a setting each, by their method.
        seeds: seeds of every setting, also as ``1-3``.
        metric: metric of the table and the figure, in percent.

    Example:
        >>> methods = {"SGD": ["SGD", "SGD_wd0p01"], "CPR": ["SGDCPR"]}
        >>> [str(run) for run in Sweep(task="digits", methods=methods, seeds=[1, 2]).runs()]
        ... # doctest: +NORMALIZE_WHITESPACE
        ['SGD_seed1', 'SGD_wd0p01_seed1', 'SGDCPR_seed1',
         'SGD_seed2', 'SGD_wd0p01_seed2', 'SGDCPR_seed2']
    """

    task: str
    methods: Annotated[dict[str, list[str]], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), number_ranges("seed")] = (
        Field(default_factory=lambda: [1, 2, 3])
    )
    metric: str = "accuracy"

    def settings(self) -> list[tuple[str, RunName]]:
        """Return the method and the name without a seed of each setting.

        Raises:
            WrongName: it is not the name of a run, or it has a seed.
        """
        settings = [
            (method, parse_run_name(name)) for method in self.methods for name in self.methods[method]
        ]
        for _, name in settings:
            if name.seed is not None:
                raise WrongName(f"{name}: expected a name without a seed; use seeds or --seeds")
        return settings

    def runs(self) -> list[RunName]:
        """Return every run once, those of the first seed first.

        Raises:
            WrongName: see :meth:`settings`.
        """
        names = [name for _, name in self.settings()]
        runs = [dataclasses.replace(name, seed=seed) for seed in self.seeds for name in names]
        return list(dict.fromkeys(runs))


def load_sweep(path: Path) -> Sweep:
    """Read a sweep from a YAML file.

    Raises:
        CannotTrain: the file is not a sweep.
        OSError: the file cannot be read.
    """
    try:
        return read_yaml(path, Sweep)
    except ValueError as error:
        raise CannotTrain(str(error)) from error
