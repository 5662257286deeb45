"""nnU-Net's folders and commands, for tests that run them."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO, Any

import pandas as pd
import pytest
import torch
from nnunetv2.experiment_planning.plan_and_preprocess_entrypoints import plan_and_preprocess_entry
from nnunetv2.inference.predict_from_raw_data import predict_entry_point
from nnunetv2.run.run_training import run_training_entry
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

from nnunet_cpr import demo
from nnunet_cpr.datasets import phantom
from nnunet_cpr.datasets.small_plans import write_small_plans
from nnunet_cpr.nnunet.commands import nnunet_environment

PLANS = "nnUNetPlansTiny"
UNSEEN = "phantom_005"


class _ThreadContext:
    """A context of multiprocessing with pools of threads."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Pool(self, processes: int) -> ThreadPool:  # noqa: N802
        return ThreadPool(processes)


class _Stopped(Exception):
    pass


@dataclass
class Workspace:
    """nnU-Net's three folders and its commands, for one data set, configuration, plans and fold."""

    folder: Path
    dataset: str
    environment: dict[str, str]
    configuration: str = "3d_fullres"
    plans: str = PLANS
    fold_id: str = "0"

    def command(self, name: str, *arguments: str) -> list[str]:
        program = shutil.which(
            name, path=sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
        )
        assert program is not None, f"{name} is not installed"
        return [program, *arguments]

    def run(self, name: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(name, *arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def run_here(self, entry: Callable[[], None], *arguments: str) -> None:
        """Run the function of a command of nnU-Net in this process, with threads for its pools.

        Another process imports nnU-Net again, and so does each process of a pool. That takes longer than
        what these tests train.
        """
        threads, get_context = torch.get_num_threads(), multiprocessing.get_context
        with pytest.MonkeyPatch.context() as patch:
            self.set_environment(patch)
            patch.setattr(sys, "argv", [entry.__name__, *arguments])
            patch.setattr(multiprocessing, "cpu_count", lambda: 1)  # threads of torch
            patch.setattr(
                multiprocessing, "get_context", lambda *method: _ThreadContext(get_context(*method))
            )
            try:
                entry()
            finally:
                torch.set_num_threads(threads)

    def set_environment(self, patch: pytest.MonkeyPatch) -> None:
        """Set nnU-Net's variables in this process."""
        for key, value in self.environment.items():
            if key.startswith("nnUNet_"):
                patch.setenv(key, value)

    def train_arguments(self, trainer: str, *options: str) -> tuple[str, ...]:
        number = self.dataset[len("Dataset") :][:3]
        model = ("-tr", trainer, "-p", self.plans, "-device", "cpu")
        return (number, self.configuration, self.fold_id, *model, *options)

    def train(self, trainer: str, *options: str, check: bool = True):
        return self.run("nnUNetv2_train", *self.train_arguments(trainer, *options), check=check)

    def train_here(self, trainer: str, *options: str) -> None:
        """Train by the function of ``nnUNetv2_train`` here, with two validation iterations an epoch."""
        initialize = nnUNetTrainer.initialize

        def initialize_short(trainer: nnUNetTrainer) -> None:
            trainer.num_val_iterations_per_epoch = 2
            initialize(trainer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nnUNetTrainer, "initialize", initialize_short)
            self.run_here(run_training_entry, *self.train_arguments(trainer, *options))

    def begin_here(self, trainer: str, epoch: int) -> None:
        """Train here and stop by an exception when an epoch begins."""
        begin = nnUNetTrainer.on_epoch_start

        def stop(trainer: nnUNetTrainer) -> None:
            if trainer.current_epoch == epoch:
                raise _Stopped
            begin(trainer)

        with pytest.MonkeyPatch.context() as patch, suppress(_Stopped):
            patch.setattr(nnUNetTrainer, "on_epoch_start", stop)
            self.train_here(trainer)
        assert not (self.fold(trainer) / "checkpoint_final.pth").exists()

    def predict_here(self, trainer: str, *options: str) -> Path:
        """Predict the unseen case here and return the folder of the label map."""
        number, configuration, fold, *model = self.train_arguments(trainer)
        images = Path(self.environment["nnUNet_raw"]) / self.dataset / "imagesTs"
        output = self.folder / "predictions" / self.model(trainer).name
        selected = ("-d", number, "-c", configuration, "-f", fold, *model, "-npp", "0", "-nps", "0")
        self.run_here(predict_entry_point, "-i", str(images), "-o", str(output), *selected, *options)
        assert [path.name for path in output.glob("*.nii.gz")] == [f"{UNSEEN}.nii.gz"]
        return output

    def train_and_kill(self, trainer: str, when: str, *options: str) -> None:
        """Start a training and send SIGKILL to all of its processes once ``when`` is in its log."""
        process = self.start(trainer, *options, output=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 900
            while when not in "".join(f.read_text() for f in self.logs(trainer)):
                assert process.poll() is None, "the training ended before it could be killed"
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, trainer: str, *options: str, output: IO[str] | int) -> subprocess.Popen[str]:
        """Start a training in a process group of its own."""
        return subprocess.Popen(
            self.command("nnUNetv2_train", *self.train_arguments(trainer, *options)),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def with_results_in(self, folder: Path) -> Workspace:
        """Return a workspace with the same data and other results."""
        environment = {**self.environment, "nnUNet_results": str(folder / "nnUNet_results")}
        return replace(self, folder=folder, environment=environment)

    def build(
        self,
        trainer: str,
        monkeypatch: pytest.MonkeyPatch,
        *,
        fold: int = 0,
        continues: bool = False,
        features: int | None = None,
        configuration: str = "3d_fullres",
        is_short: bool = False,
    ) -> nnUNetTrainer:
        """Build a trainer as nnU-Net does, up to ``initialize``; a short one trains for two steps."""
        self.set_environment(monkeypatch)
        preprocessed = Path(self.environment["nnUNet_preprocessed"]) / self.dataset
        plans = json.loads((preprocessed / f"{PLANS}.json").read_text())
        if features is not None:
            network = plans["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
            network["features_per_stage"] = [features] * network["n_stages"]
        built = recursive_find_trainer_class_by_name(trainer)(
            plans={**plans, "continue_training": continues},
            configuration=configuration,
            fold=fold,
            dataset_json=json.loads((preprocessed / "dataset.json").read_text()),
            device=torch.device("cpu"),
        )
        if is_short:
            built.num_epochs, built.num_iterations_per_epoch = 1, 2
            built.num_val_iterations_per_epoch = 2
        built.initialize()
        return built

    def finish(self, trainer: str) -> Path:
        """Train a fold for an epoch of two iterations and return its folder."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            self.build(trainer, monkeypatch, is_short=True).run_training()
        return self.fold(trainer)

    def model(self, trainer: str) -> Path:
        name = f"{trainer}__{self.plans}__{self.configuration}"
        return self.folder / "nnUNet_results" / self.dataset / name

    def fold(self, trainer: str) -> Path:
        return self.model(trainer) / f"fold_{self.fold_id}"

    def logs(self, trainer: str) -> list[Path]:
        return sorted(self.fold(trainer).glob("training_log_*.txt"))

    def history(self, trainer: str) -> pd.DataFrame:
        return pd.read_csv(self.fold(trainer) / "cpr_history.csv")

    def checkpoint(self, trainer: str, name: str = "checkpoint_final.pth") -> dict:
        return torch.load(self.fold(trainer) / name, weights_only=False, map_location="cpu")


def make_workspace(folder: Path) -> Workspace:
    """Return a small data set, planned and preprocessed by nnU-Net."""
    space = Workspace(folder, demo.DATASET, nnunet_environment(folder, processes=1))
    del space.environment["nnUNet_extTrainer"]  # every process finds the trainers by itself
    space.environment["nnUNet_compile"] = "f"
    phantom.write_dataset(folder / "nnUNet_raw" / space.dataset, training_cases=5)
    space.run_here(plan_and_preprocess_entry, "-d", "901", "-c", "3d_fullres", "-np", "1")
    preprocessed = folder / "nnUNet_preprocessed" / space.dataset
    write_small_plans(preprocessed, "nnUNetPlans", PLANS, patch=32)
    plans = json.loads((preprocessed / f"{PLANS}.json").read_text())
    configuration = plans["configurations"]["3d_fullres"]
    configuration["patch_size"] = [24, 24, 24]
    stages = configuration["architecture"]["arch_kwargs"]["n_stages"]
    configuration["architecture"]["arch_kwargs"]["features_per_stage"] = [4] * stages
    (preprocessed / f"{PLANS}.json").write_text(json.dumps(plans))
    # Loading in the training's own process: what it draws depends on its seed alone.
    space.environment["nnUNet_n_proc_DA"] = "0"
    return space
