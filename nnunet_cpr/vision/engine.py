"""The training of a run, from its first step or from where it was stopped."""

from __future__ import annotations

import dataclasses
import gc
import json
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr._files import atomic_torch_save, atomic_write
from nnunet_cpr._seeding import seed_all
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.vision import dynamics
from nnunet_cpr.vision.cosine_lr import learning_rate
from nnunet_cpr.vision.data_fingerprint import fingerprint
from nnunet_cpr.vision.dynamics_figure import draw_dynamics
from nnunet_cpr.vision.folder import (
    CHECKPOINT,
    DYNAMICS,
    FIGURE,
    HISTORY,
    MODEL,
    RESULT,
    folder_of,
    forget,
    locked,
    result_of,
)
from nnunet_cpr.vision.optimizers import build_optimizer
from nnunet_cpr.vision.task import Batch, CannotTrain, Diverged, Options, Prepared, Task

Progress = Callable[[int, int, dict[str, float]], None]
"""Called with the steps done, the steps in all, and the last evaluation."""


@dataclass
class _Record:
    """What a run has to show so far; it goes into the checkpoint, so that both always agree."""

    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    dynamics: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
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
    progress: Progress = lambda done, steps, numbers: None,
) -> dict[str, Any]:
    """Train a run to its end and return its result; one that is done is not trained again.

    Raises:
        CannotTrain: the folder holds the run with other settings or data, the task refuses the options,
            or the device has too little memory.
        Diverged: the loss is not finite, now or when the run was trained.
        InUse: another process trains the run.
        OSError: the data cannot be read, or the folder not be written.
    """
    folder = folder_of(results, task, name)
    run = task.complete(name)
    task.check_settings(options.settings)
    result = _done(folder, run, task, options)
    if result is None or options.again:
        try:
            result = _trained(task, run, folder, options, progress)
        except torch.OutOfMemoryError as error:
            raise CannotTrain(
                f"{options.device} has too little memory for {name}; free some, or split batches with "
                f"--microbatches {2 * options.microbatches}; it goes on from its last checkpoint"
            ) from error
        finally:
            if options.device.type != "cpu":
                gc.collect()  # optimizer and CPR hold each other, and with them the device's memory
    else:
        (folder / CHECKPOINT).unlink(missing_ok=True)  # a kill may have left it
    if "diverged" in result:
        raise Diverged(
            f"the loss of {name} was not finite before step {result['diverged']}; try a smaller _lr<V>, "
            "or train it again with vision run --again"
        )
    return result


def _done(folder: Path, run: RunName, task: Task, options: Options) -> dict[str, Any] | None:
    """The result of the run that the folder holds, if it is done."""
    result = result_of(folder)
    if result is not None:
        _check_same(folder / RESULT, result, run, _conditions(task, options))
    return result


def _trained(
    task: Task, run: RunName, folder: Path, options: Options, progress: Progress
) -> dict[str, Any]:
    with ExitStack() as stack:
        # A run that cannot begin leaves no folder; where there is one, the lock comes before the data,
        # which may take long to load.
        is_locked = folder.is_dir()
        if is_locked:
            stack.enter_context(locked(folder))
        prepared = _prepared(task, run, options)
        if not is_locked:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
        done = _done(folder, run, task, options)
        if done is not None and not options.again:
            return done  # another process has finished it meanwhile
        if done is not None:
            forget(folder)
        model = prepared.model.to(options.device)
        optimizer = build_optimizer(model, run, task)
        conditions = _conditions(task, options)
        training = _Training(
            task, run, folder, options, conditions, prepared, model, optimizer, progress
        )
        training.resume()
        return training.to_the_end()


def _prepared(task: Task, run: RunName, options: Options) -> Prepared:
    if run.defaults.cpr and run.bound.earliest >= run.total_steps:
        warnings.warn(
            f"{task.shorten(run)} regularizes nothing: no bound is set before step "
            f"{run.bound.earliest}, and it has {run.total_steps} steps",
            stacklevel=4,
        )
    assert run.seed is not None
    seed_all(run.seed, 0)
    prepared = task.prepare(options)
    if options.microbatches > 1 and any(map(_sees_batches, prepared.model.modules())):
        raise CannotTrain(
            f"the network of {task.name} normalizes over the whole batch, which cannot be split; "
            "leave out --microbatches"
        )
    return prepared


def _sees_batches(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _conditions(task: Task, options: Options) -> dict[str, str]:
    """What a run is trained with beside its name, if it is not what everybody has."""
    changed = {"bf16": "yes"} if options.bf16 else {}
    for key, value in options.settings.items():
        if key not in task.settings_without_effect:
            changed[key] = str(Path(value).resolve()) if Path(value).exists() else value
    data = None if options.data is None else fingerprint(options.data, task.data_folders)
    return changed if data is None else changed | {"data": data}


def _check_same(path: Path, saved: Mapping[str, Any], run: RunName, conditions: dict[str, str]) -> None:
    keys = saved["settings"].keys() | conditions.keys()
    if not ("data" in saved["settings"] and "data" in conditions):
        keys -= {"data"}  # what is done may be asked for without its data
    before, now = (
        " ".join([name, *(f"{key}={settings[key]}" for key in sorted(keys & settings.keys()))])
        for name, settings in ((saved["run"], saved["settings"]), (str(run), conditions))
    )
    if before != now:
        raise CannotTrain(f"{path} is of {before}, not of {now}; use other --results")


@dataclass
class _Training:
    task: Task
    run: RunName
    folder: Path
    options: Options
    conditions: dict[str, str]
    prepared: Prepared
    model: nn.Module
    optimizer: Optimizer
    progress: Progress
    record: _Record = dataclasses.field(default_factory=_Record)
    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.dynamics = dynamics.Dynamics(self.model, self.optimizer)

    def resume(self) -> None:
        """Go on from the folder's checkpoint, if there is one."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            self.record.dynamics += self.dynamics.rows(0)
            return
        try:
            saved = torch.load(path, map_location=self.options.device, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise CannotTrain(f"{path} is damaged; delete it, and the run starts anew") from error
        _check_same(path, saved, self.run, self.conditions)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epoch, self.step = saved["epoch"], saved["step"]
        self.record = _Record(saved["history"], saved["dynamics"], saved["seconds"])
        self.record.write(self.folder)  # a kill may have come between it and the checkpoint

    def to_the_end(self) -> dict[str, Any]:
        """Train what is left, and leave the result."""
        try:
            self._train()
            outcome: dict[str, Any] = self.record.history[-1]
            draw_dynamics({str(self.run): self.folder}, self.folder / FIGURE)
            if self.options.keep_model:
                atomic_torch_save(self.model.state_dict(), self.folder / MODEL)
        except Diverged:
            outcome = {"diverged": self.step}
        result = {
            "run": str(self.run),
            "settings": self.conditions,
            "task": self.task.name,
            "metric": self.task.metric,
            **outcome,
            "seconds": round(self.record.seconds, 1),
        }
        with atomic_write(self.folder / RESULT) as path:
            path.write_text(json.dumps(result, indent=2) + "\n")
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return result

    def _train(self) -> None:
        started = time.perf_counter() - self.record.seconds
        total = self.run.total_steps
        self.progress(self.step, total, self.record.history[-1] if self.record.history else {})
        while self.step < total:
            loss = self._train_epoch()
            self.epoch += 1
            if self.epoch % self.task.epochs_between and self.step < total:
                continue
            numbers = self._evaluate()
            _check_finite(numbers["loss"])
            self.record.history.append(
                {"step": self.step, "lr": self._lr(), "train_loss": loss} | numbers
            )
            self.record.dynamics += self.dynamics.rows(self.step)
            self.record.seconds = time.perf_counter() - started
            self._save()
            self.progress(self.step, total, self.record.history[-1])

    def _lr(self) -> float:
        assert self.run.lr is not None
        return learning_rate(
            self.task, self.run.lr, self.step, self.run.warmup_steps, self.run.total_steps
        )

    def _train_epoch(self) -> float:
        """Until the epoch or the training ends; the mean loss."""
        assert self.run.seed is not None
        seed_all(self.run.seed, 1 + self.epoch)
        self.model.train()
        losses = []
        for batch in self.prepared.epoch(self.epoch):
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr()
            losses.append(self._train_step(batch))
            self.step += 1
            self.progress(self.step, self.run.total_steps, {})
            if self.step == self.run.total_steps:
                break
        mean = torch.stack(losses).mean().item()
        _check_finite(mean)
        return mean

    def _train_step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.options.device)
        size = _size(batch)
        for part in _split(batch, self.options.microbatches):
            share = _size(part) / size
            with self._autocast():
                loss = self.prepared.loss(self.model, _to(part, self.options.device)) * share
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
            numbers = self.prepared.evaluate(self.model)
            if self.step == self.run.total_steps and self.prepared.evaluate_last is not None:
                numbers |= self.prepared.evaluate_last(self.model)
        return numbers

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.options.device.type, torch.bfloat16, enabled=self.options.bf16)

    def _save(self) -> None:
        state = {
            "run": str(self.run),
            "settings": self.conditions,
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


def _to(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to(value, device) for key, value in batch.items()}
    return type(batch)(_to(value, device) for value in batch)


def _size(batch: Batch) -> int:
    """How many samples it holds."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)


def _split(batch: Batch, parts: int) -> Iterator[Batch]:
    """A batch in parts, for gradients that are added up."""
    if parts == 1:
        yield batch
        return
    if isinstance(batch, Tensor):
        yield from batch.chunk(parts)
    elif isinstance(batch, dict):
        columns = [list(_split(value, parts)) for value in batch.values()]
        yield from (dict(zip(batch, row)) for row in zip(*columns))
    else:
        columns = [list(_split(value, parts)) for value in batch]
        yield from (type(batch)(row) for row in zip(*columns))
