"""The training of a run, from its first step or from where it was stopped."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr.files import replacing
from nnunet_cpr.vision import dynamics
from nnunet_cpr.vision.figures import draw_dynamics
from nnunet_cpr.vision.folder import (
    CHECKPOINT,
    DYNAMICS,
    FIGURE,
    HISTORY,
    MODEL,
    RESULT,
    folder_of,
    result_of,
)
from nnunet_cpr.vision.names import RunName
from nnunet_cpr.vision.optimizers import build_optimizer
from nnunet_cpr.vision.schedule import learning_rate
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
            with replacing(folder / name) as path:
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
        CannotTrain: the folder holds the run with other settings, or the task refuses the options.
        Diverged: the loss is not finite.
        OSError: the data cannot be read, or the folder not be written.
    """
    folder = folder_of(results, task, name)
    run = task.complete(name)
    done = result_of(folder)
    if done is not None:
        _check_same(folder / RESULT, done, run, task, options)
        (folder / CHECKPOINT).unlink(missing_ok=True)  # a kill may have left it
        return done
    if run.defaults.cpr and run.bound.earliest >= run.total_steps:
        warnings.warn(
            f"{name} regularizes nothing: no bound is set before step {run.bound.earliest}, and it has "
            f"{run.total_steps} steps",
            stacklevel=2,
        )
    assert run.seed is not None
    _seed(run.seed, 0)
    prepared = task.prepare(options)
    if options.microbatches > 1 and any(map(_sees_batches, prepared.model.modules())):
        raise CannotTrain(
            f"the network of {task.name} normalizes over the whole batch, which cannot be split; "
            "leave out --microbatches"
        )
    folder.mkdir(parents=True, exist_ok=True)
    model = prepared.model.to(options.device)
    optimizer = build_optimizer(model, run, task)
    training = _Training(task, run, folder, options, prepared, model, optimizer, progress)
    training.resume()
    return training.to_the_end()


def _sees_batches(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _conditions(task: Task, options: Options) -> dict[str, str]:
    """What a run is trained with beside its name, if it is not what everybody has."""
    changed = {"bf16": "yes"} if options.bf16 else {}
    for key, value in options.settings.items():
        if key not in task.settings_without_effect:
            changed[key] = str(Path(value).resolve()) if Path(value).exists() else value
    return changed


def _check_same(
    path: Path, saved: Mapping[str, Any], run: RunName, task: Task, options: Options
) -> None:
    def described(run: str, settings: Mapping[str, str]) -> str:
        return " ".join([run, *(f"{key}={value}" for key, value in sorted(settings.items()))])

    before = described(saved["run"], saved["settings"])
    now = described(str(run), _conditions(task, options))
    if before != now:
        raise CannotTrain(f"{path} is of {before}, not of {now}; use other --results")


@dataclass
class _Training:
    task: Task
    run: RunName
    folder: Path
    options: Options
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
        _check_same(path, saved, self.run, self.task, self.options)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epoch, self.step = saved["epoch"], saved["step"]
        self.record = _Record(saved["history"], saved["dynamics"], saved["seconds"])
        self.record.write(self.folder)  # a kill may have come between it and the checkpoint

    def to_the_end(self) -> dict[str, Any]:
        """Train what is left, and leave the result."""
        started = time.perf_counter() - self.record.seconds
        total = self.run.total_steps
        self.progress(self.step, total, self.record.history[-1] if self.record.history else {})
        while self.step < total:
            loss = self._train_epoch()
            self.epoch += 1
            if self.epoch % self.task.epochs_between and self.step < total:
                continue
            numbers = self._evaluate()
            self._check_finite(numbers["loss"])
            self.record.history.append(
                {"step": self.step, "lr": self._lr(), "train_loss": loss} | numbers
            )
            self.record.dynamics += self.dynamics.rows(self.step)
            self.record.seconds = time.perf_counter() - started
            self._save()
            self.progress(self.step, total, self.record.history[-1])
        result = {
            "run": str(self.run),
            "settings": _conditions(self.task, self.options),
            "task": self.task.name,
            "metric": self.task.metric,
            **self.record.history[-1],
            "seconds": round(self.record.seconds, 1),
        }
        draw_dynamics({str(self.run): self.folder}, self.folder / FIGURE)
        if self.options.keep_model:
            with replacing(self.folder / MODEL) as path:
                torch.save(self.model.state_dict(), path)
        with replacing(self.folder / RESULT) as path:
            path.write_text(json.dumps(result, indent=2) + "\n")
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return result

    def _lr(self) -> float:
        assert self.run.lr is not None
        return learning_rate(
            self.task, self.run.lr, self.step, self.run.warmup_steps, self.run.total_steps
        )

    def _train_epoch(self) -> float:
        """Until the epoch or the training ends; the mean loss."""
        assert self.run.seed is not None
        _seed(self.run.seed, 1 + self.epoch)
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
        self._check_finite(mean)
        return mean

    def _check_finite(self, loss: float) -> None:
        if not np.isfinite(loss):
            raise Diverged(
                f"the loss of {self.run} was not finite before step {self.step}; try a smaller _lr<V>"
            )

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
            "settings": _conditions(self.task, self.options),
            "epoch": self.epoch,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.record.history,
            "dynamics": self.record.dynamics,
            "seconds": self.record.seconds,
        }
        with replacing(self.folder / CHECKPOINT) as path:
            torch.save(state, path)
        self.record.write(self.folder)


def _seed(seed: int, stream: int) -> None:
    """Seed all global generators; stream 0 is the initial weights, 1 + e is epoch e."""
    words = np.random.SeedSequence([seed, stream])
    number = int(words.generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


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
