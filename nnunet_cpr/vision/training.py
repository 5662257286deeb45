"""Training of a run, from its first step or from a checkpoint.

Files in the folder of a run:

- ``history.csv``: step, learning rate, training loss and the task's metrics, at every evaluation;
- ``dynamics.csv``: regularization value, kappa and lambda of every parameter matrix at the same steps,
  for runs with CPR;
- ``checkpoint.pt``: the state to resume from, until the run is finished;
- ``result.json``: the last evaluation, or the step at which the run diverged; it marks a finished run;
- ``.lock``: locked while a process trains the run.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import pickle
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock, Timeout
from torch import nn
from torch.nn import functional

from nnunet_cpr.cpr.algorithm import CPR
from nnunet_cpr.cpr.attachment import attached_method
from nnunet_cpr.environment import seed_all
from nnunet_cpr.files import atomic_torch_save, atomic_write, read_json
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.refusals import Refusal, RefusedItem, counted
from nnunet_cpr.vision.optimizer import build_optimizer
from nnunet_cpr.vision.task import Metrics, Setup, Task

CHECKPOINT, RESULT = "checkpoint.pt", "result.json"
HISTORY, DYNAMICS = "history.csv", "dynamics.csv"
DYNAMICS_COLUMNS = ["step", "parameter", "measure", "kappa", "multiplier"]


def train(
    task: Task,
    name: RunName,
    results: Path,
    data: Path | None = None,
    device: torch.device = torch.device("cpu"),
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Train a run and return its result; a finished run is not trained again.

    Args:
        task: the task.
        name: name of the run.
        results: folder of the runs' folders.
        data: folder of the data set; None for tasks that need none.
        device: device to train on.
        progress: function to call after each step.

    Raises:
        Refusal: the task rejects the data, or the folder holds the run with other settings.
        RefusedItem: the loss is not finite, now or in the run that the folder holds, or another process
            trains the run.
        OSError: the data cannot be read, or the folder cannot be written.
    """
    folder, run = run_folder(results, task, name), task.complete(name)
    result = read_result(folder)
    if result is None:
        kappa, steps = run.training.kappa, run.training.steps
        if kappa is not None and run.training.is_never_bounded:
            warnings.warn(
                f"{name} regularizes nothing: no bound is set before step {kappa.earliest}, and it "
                f"has {counted(steps, 'step')}",
                stacklevel=2,
            )
        assert run.seed is not None  # the name is complete
        seed_all(run.seed, 0)
        setup = task.setup(data, device)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".lock", timeout=0):
                # Another process may have finished the run in the meantime.
                result = read_result(folder) or _Training(task, run, folder, setup, device).run(progress)
        except Timeout:
            raise RefusedItem(f"{folder} is in use: another process trains this run") from None
        finally:
            gc.collect()  # frees the reference cycle of optimizer and CPR, and with it the GPU's memory
    _check_same_run(folder / RESULT, result, run)
    if "diverged" in result:
        raise RefusedItem(
            f"{name} diverged: its loss is not finite before step {result['diverged']}",
            f"use a smaller _lr<V>, or delete {folder} to train it again",
        )
    return result


def run_folder(results: Path, task: Task, name: RunName) -> Path:
    """Return ``results/TASK/NAME``, with seed 1 if the name has none."""
    seeded = name if name.seed is not None else dataclasses.replace(name, seed=1)
    return results / task.name / str(seeded)


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run, or None if the run is not finished.

    Raises:
        OSError: the file cannot be read, or it is not a result of a run.
    """
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        result = read_json(path)
        if isinstance(result["run"], str) and ("diverged" in result or result["loss"] is not None):
            return dict(result)
    except (ValueError, KeyError, TypeError):
        pass
    raise _damaged(path)


def _damaged(path: Path) -> OSError:
    return OSError(f"{path} is damaged; delete {path.parent} to train the run again")


def _check_same_run(path: Path, saved: dict[str, Any], run: RunName) -> None:
    if saved["run"] != str(run):
        raise Refusal(f"{path}: expected {run}, got {saved['run']}", "use other --results")


def learning_rate_factor(step: int, warmup: int, total: int, final: float = 0.1) -> float:
    """Return the learning rate of a step as a multiple of the highest learning rate.

    The learning rate rises linearly during the warm-up and then follows a cosine.

    Args:
        step: index of the step, from 0.
        warmup: number of warm-up steps; the last one has the highest learning rate.
        total: number of steps of the run; the last one is just above ``final``.
        final: multiple at which the cosine ends.

    Example:
        >>> [learning_rate_factor(step, warmup=2, total=4) for step in range(4)]
        [0.5, 1.0, 1.0, 0.55]
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return final + (1 - final) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


class _Training:
    """Training loop of a run."""

    def __init__(
        self, task: Task, run: RunName, folder: Path, setup: Setup, device: torch.device
    ) -> None:
        self.task, self.name, self.folder, self.setup, self.device = task, run, folder, setup, device
        self.training = run.training
        self.model = setup.model.to(device)
        self.optimizer = build_optimizer(self.model, run, task)
        method = attached_method(self.optimizer)
        if isinstance(method, CPR):
            method.warns_of_unset_bounds = False  # `train` has, at the start
        self.epoch = self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []
        self.dynamics: list[tuple[Any, ...]] = []
        if (folder / CHECKPOINT).exists():
            self._resume()

    def run(self, progress: Callable[[], object]) -> dict[str, Any]:
        """Train the remaining steps, write the result and return it."""
        started = time.perf_counter() - self.seconds
        try:
            while self.step < self.training.steps:
                self._train_until_evaluation(progress)
                self.seconds = time.perf_counter() - started
                self._save()
            outcome: dict[str, Any] = self.history[-1]
        except FloatingPointError:
            outcome = {"diverged": self.step}
        result = {"run": str(self.name), "task": self.task.name, **outcome}
        result["seconds"] = round(self.seconds, 1)
        with atomic_write(self.folder / RESULT) as path:
            path.write_text(json.dumps(result, indent=2) + "\n")
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return result

    def _train_until_evaluation(self, progress: Callable[[], object]) -> None:
        loss = math.nan
        for _ in range(self.task.epochs_between):
            if self.step < self.training.steps:
                loss = self._train_epoch(progress)
        metrics = self._evaluate()
        _check_finite(metrics["loss"])
        self.history.append({"step": self.step, "lr": self._lr(), "train_loss": loss} | metrics)
        cpr = getattr(self.optimizer, "cpr", None)
        if isinstance(cpr, CPR):
            values = (cpr.measure, cpr.kappa, cpr.lagrange_multiplier)
            rows = zip(cpr.names, *(value.tolist() for value in values))
            self.dynamics += [(self.step, *row) for row in rows]

    def _train_epoch(self, progress: Callable[[], object]) -> float:
        """Train to the end of the epoch or of the run, and return the mean loss."""
        assert self.name.seed is not None
        seed_all(self.name.seed, 1 + self.epoch)
        self.model.train()
        losses = []  # stay on the device, so that no step waits for the one before
        for inputs, labels in self.setup.batches():
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr()
            self.optimizer.zero_grad()
            logits = self.model(inputs.to(self.device))
            loss = functional.cross_entropy(logits, labels.to(self.device))
            loss.backward()
            if self.task.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
            self.optimizer.step()
            losses.append(loss.detach())
            self.step += 1
            progress()
            if self.step == self.training.steps:
                break
        self.epoch += 1
        mean = torch.stack(losses).mean().item()
        _check_finite(mean)
        return mean

    def _lr(self) -> float:
        run = self.training
        assert run.lr is not None
        return run.lr * learning_rate_factor(self.step, run.warmup, run.steps, self.task.final_lr)

    @torch.no_grad()
    def _evaluate(self) -> Metrics:
        self.model.eval()
        metrics = self.setup.evaluate(self.model)
        if self.step == self.training.steps and self.setup.evaluate_last is not None:
            metrics |= self.setup.evaluate_last(self.model)
        return metrics

    def _save(self) -> None:
        state = {
            "run": str(self.name),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{key: getattr(self, key) for key in _PROGRESS},
        }
        # Before the checkpoint, from which a run that is killed in between writes them again.
        tables = {HISTORY: pd.DataFrame(self.history)}
        if self.dynamics:
            tables[DYNAMICS] = pd.DataFrame(self.dynamics, columns=DYNAMICS_COLUMNS)
        for name, table in tables.items():
            with atomic_write(self.folder / name) as path:
                table.to_csv(path, index=False, float_format="%.9g")
        atomic_torch_save(state, self.folder / CHECKPOINT)

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        try:
            saved = torch.load(path, map_location=self.device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError):  # depending on where it is damaged
            raise _damaged(path) from None
        _check_same_run(path, saved, self.name)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        for key in _PROGRESS:
            setattr(self, key, saved[key])


_PROGRESS = ("epoch", "step", "seconds", "history", "dynamics")
"""Attributes of a training that a checkpoint holds."""


def _check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError("the loss is not finite")
