"""Training of a run, from its first step or from a checkpoint."""

from __future__ import annotations

import gc
import json
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr._files import atomic_torch_save, atomic_write
from nnunet_cpr._seeding import seed_all
from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import RunName, parse_run_name
from nnunet_cpr.vision import dynamics
from nnunet_cpr.vision.cosine_lr import learning_rate
from nnunet_cpr.vision.data_digest import data_digest
from nnunet_cpr.vision.dynamics_figure import draw_dynamics
from nnunet_cpr.vision.folder import (
    CHECKPOINT,
    DYNAMICS,
    FIGURE,
    HISTORY,
    MODEL,
    RESULT,
    delete_run_files,
    lock_folder,
    read_result,
    run_folder,
)
from nnunet_cpr.vision.optimizer_factory import build_optimizer
from nnunet_cpr.vision.task import Batch, CannotTrain, Diverged, Options, Setup, Task

Progress = Callable[[int, int], None]
"""Function of the steps done and the total number of steps."""


@dataclass
class _Record:
    """Tables of a run so far, saved in the checkpoint, so that both always agree."""

    history: list[dict[str, float]] = field(default_factory=list)
    dynamics: list[tuple[Any, ...]] = field(default_factory=list)
    seconds: float = 0.0

    def write(self, folder: Path) -> None:
        tables = {
            HISTORY: pd.DataFrame(self.history),
            DYNAMICS: pd.DataFrame(self.dynamics, columns=dynamics.COLUMNS),
        }
        for name, table in tables.items():
            with atomic_write(folder / name) as path:
                table.to_csv(path, index=False, float_format="%.9g")


def train(
    task: Task,
    name: RunName,
    results: Path,
    options: Options,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Train a run and return its result; a finished run is not trained again.

    Args:
        task: the task.
        name: name of the run.
        results: folder of the runs' folders.
        options: options of the run.
        progress: function to call after each step.

    Raises:
        CannotTrain: the folder holds the run with other settings or data, the task rejects the options,
            or the device has too little memory.
        Diverged: the loss is not finite, now or in the run that the folder holds.
        InUse: another process trains the run.
        OSError: the data cannot be read, or the folder cannot be written.
    """
    folder = run_folder(results, task, name)
    run = task.complete(name)
    task.check_settings(options.settings)
    result = _read_matching_result(folder, run, task, options)
    if result is None or options.again:
        try:
            result = _train_locked(task, run, folder, options, progress)
        except torch.OutOfMemoryError as error:
            raise CannotTrain(
                f"{options.device} is out of memory for {name}; split the batches with --microbatches "
                f"{2 * options.microbatches} to resume from the last checkpoint"
            ) from error
        finally:
            if options.device.type != "cpu":
                gc.collect()  # frees the reference cycle of optimizer and CPR
    else:
        (folder / CHECKPOINT).unlink(missing_ok=True)  # left by a kill after the result
    if "diverged" in result:
        raise Diverged(
            f"{name} diverged: its loss is not finite before step {result['diverged']}; use a smaller "
            "_lr<V>, or train it again with vision run --again"
        )
    return result


def _read_matching_result(
    folder: Path, run: RunName, task: Task, options: Options
) -> dict[str, Any] | None:
    """Return the result of a finished run, which has to be of the same settings."""
    result = read_result(folder)
    if result is not None:
        _check_settings_match(folder / RESULT, result, task, run, _recorded_settings(task, options))
    return result


def _train_locked(
    task: Task, run: RunName, folder: Path, options: Options, progress: Progress
) -> dict[str, Any]:
    with ExitStack() as stack:
        # A run that cannot start leaves no folder. An existing folder is locked before the data is
        # loaded, which may take long.
        is_locked = folder.is_dir()
        if is_locked:
            stack.enter_context(lock_folder(folder))
        setup = _set_up(task, run, options)
        if not is_locked:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_folder(folder))
        result = _read_matching_result(folder, run, task, options)
        if result is not None and not options.again:
            return result  # of another process, which has finished the run in the meantime
        if result is not None:
            delete_run_files(folder)
        loop = _TrainingLoop(task, run, folder, options, setup, progress)
        loop.resume()
        return loop.train()


def _set_up(task: Task, run: RunName, options: Options) -> Setup:
    if run.defaults.cpr and run.bound.earliest >= run.total_steps:
        warnings.warn(
            f"{task.shorten(run)} regularizes nothing: no bound is set before step "
            f"{run.bound.earliest}, and it has {run.total_steps} steps",
            stacklevel=4,
        )
    assert run.seed is not None
    seed_all(run.seed, 0)
    setup = task.setup(options)
    batch_norm = nn.modules.batchnorm._BatchNorm
    if options.microbatches > 1 and any(isinstance(m, batch_norm) for m in setup.model.modules()):
        raise CannotTrain(
            f"--microbatches {options.microbatches}: the network of {task.name} has batch "
            "normalization, so its batches cannot be split; leave the option out"
        )
    return setup


def _recorded_settings(task: Task, options: Options) -> dict[str, str]:
    """Return the options that change a run, apart from its name."""
    settings = {"bf16": "yes"} if options.bf16 else {}
    for key, value in options.settings.items():
        if key not in task.settings_without_effect:
            is_path = key in task.path_settings and Path(value).exists()
            settings[key] = str(Path(value).resolve()) if is_path else value
    data = options.data
    digest = None if data is None else data_digest(data, task.data_folders, task.data_suffix)
    return settings if digest is None else settings | {"data": digest}


def _check_settings_match(
    path: Path, saved: Mapping[str, Any], task: Task, run: RunName, settings: dict[str, str]
) -> None:
    keys = saved["settings"].keys() | settings.keys()
    if not ("data" in saved["settings"] and "data" in settings):
        keys -= {"data"}  # the result of a finished run is available without its data
    found, expected = (
        " ".join([name, *(f"{key}={values[key]}" for key in sorted(keys & values.keys()))])
        for name, values in (
            (_one_spelling(task, saved["run"]), saved["settings"]),
            (_one_spelling(task, str(run)), settings),
        )
    )
    if found != expected:
        raise CannotTrain(f"{path}: expected {expected}, got {found}; use other --results")


def _one_spelling(task: Task, name: str) -> str:
    """Return the same name for all spellings of a run, and an invalid name as it is."""
    try:
        return str(task.complete(task.shorten(parse_run_name(name))))
    except WrongName:
        return name


@dataclass
class _TrainingLoop:
    task: Task
    run: RunName
    folder: Path
    options: Options
    setup: Setup
    progress: Progress
    record: _Record = field(default_factory=_Record)
    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.settings = _recorded_settings(self.task, self.options)
        self.model = self.setup.model.to(self.options.device)
        self.optimizer: Optimizer = build_optimizer(self.model, self.run, self.task)
        self.dynamics = dynamics.Dynamics(self.model, self.optimizer)

    def resume(self) -> None:
        """Load the folder's checkpoint, if there is one."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            self.record.dynamics += self.dynamics.rows(0)
            return
        try:
            saved = torch.load(path, map_location=self.options.device, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise CannotTrain(f"{path} is damaged; delete it to train the run again") from error
        _check_settings_match(path, saved, self.task, self.run, self.settings)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epoch, self.step = saved["epoch"], saved["step"]
        self.record = _Record(saved["history"], saved["dynamics"], saved["seconds"])
        self.record.write(self.folder)  # a kill after the checkpoint may have left old tables

    def train(self) -> dict[str, Any]:
        """Train the remaining steps, write the result and return it."""
        try:
            self._train_epochs()
            outcome: dict[str, Any] = self.record.history[-1]
            draw_dynamics({str(self.run): self.folder}, self.folder / FIGURE)
            if self.options.keep_model:
                atomic_torch_save(self.model.state_dict(), self.folder / MODEL)
        except Diverged:
            outcome = {"diverged": self.step}
        result = {
            "run": str(self.run),
            "settings": self.settings,
            "task": self.task.name,
            "metric": self.task.metric,
            **outcome,
            "seconds": round(self.record.seconds, 1),
        }
        with atomic_write(self.folder / RESULT) as path:
            path.write_text(json.dumps(result, indent=2) + "\n")
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return result

    def _train_epochs(self) -> None:
        started = time.perf_counter() - self.record.seconds
        total = self.run.total_steps
        self.progress(self.step, total)
        while self.step < total:
            loss = self._train_epoch()
            self.epoch += 1
            if self.epoch % self.task.epochs_between and self.step < total:
                continue
            metrics = self._evaluate()
            _check_finite(metrics["loss"])
            self.record.history.append(
                {"step": self.step, "lr": self._lr(), "train_loss": loss} | metrics
            )
            self.record.dynamics += self.dynamics.rows(self.step)
            self.record.seconds = time.perf_counter() - started
            self._save()

    def _lr(self) -> float:
        assert self.run.lr is not None
        return learning_rate(
            self.task, self.run.lr, self.step, self.run.warmup_steps, self.run.total_steps
        )

    def _train_epoch(self) -> float:
        """Train to the end of the epoch or of the run, and return the mean loss."""
        assert self.run.seed is not None
        seed_all(self.run.seed, 1 + self.epoch)
        self.model.train()
        losses = []
        for batch in self.setup.epoch(self.epoch):
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr()
            losses.append(self._train_step(batch))
            self.step += 1
            self.progress(self.step, self.run.total_steps)
            if self.step == self.run.total_steps:
                break
        mean = torch.stack(losses).mean().item()
        _check_finite(mean)
        return mean

    def _train_step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.options.device)
        batch_size = _batch_size(batch)
        for part in _split_batch(batch, self.options.microbatches):
            weight = _batch_size(part) / batch_size
            with self._autocast():
                loss = self.setup.loss(self.model, _to_device(part, self.options.device)) * weight
            loss.backward()
            total += loss.detach()
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()
        return total

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        self.model.eval()
        with self._autocast():
            metrics = self.setup.evaluate(self.model)
            if self.step == self.run.total_steps and self.setup.evaluate_last is not None:
                metrics |= self.setup.evaluate_last(self.model)
        return metrics

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.options.device.type, torch.bfloat16, enabled=self.options.bf16)

    def _save(self) -> None:
        state = {
            "run": str(self.run),
            "settings": self.settings,
            "epoch": self.epoch,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.record.history,
            "dynamics": self.record.dynamics,
            "seconds": self.record.seconds,
        }
        atomic_torch_save(state, self.folder / CHECKPOINT)
        self.record.write(self.folder)


def _check_finite(loss: float) -> None:
    if not np.isfinite(loss):
        raise Diverged


def _to_device(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    return type(batch)(_to_device(value, device) for value in batch)


def _batch_size(batch: Batch) -> int:
    """Return the number of samples."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)


def _split_batch(batch: Batch, parts: int) -> Iterator[Batch]:
    """Yield the parts of a batch, for gradient accumulation."""
    if parts == 1:
        yield batch
        return
    if isinstance(batch, Tensor):
        yield from batch.chunk(parts)
    elif isinstance(batch, dict):
        columns = [list(_split_batch(value, parts)) for value in batch.values()]
        yield from (dict(zip(batch, row)) for row in zip(*columns))
    else:
        columns = [list(_split_batch(value, parts)) for value in batch]
        yield from (type(batch)(row) for row in zip(*columns))
