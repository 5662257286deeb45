"""Worker for torchrun: two processes of one training save their final states."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.helpers.client_training import METHODS, samples


def lightning_runs(folder: Path) -> dict[str, Any]:
    """Train with each method, stop after an epoch, and resume for another."""
    from tests.compatibility.test_lightning import Regression, trained_by_lightning, trainer_for

    # Lightning's own sampler shuffles; this one gives the processes the batches of the plain loop.
    data = TensorDataset(*samples())
    sampler = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    results = {}
    for method, build in METHODS.items():
        trainer = trainer_for("64-true", "norm", **options)
        trainer.fit(Regression(build, decay=0.9), loader)
        trainer.save_checkpoint(folder / f"{method}.ckpt")
        dist.barrier()
        results[method] = trained_by_lightning(
            trainer_for("64-true", "norm", max_epochs=2, **options),
            Regression(build, decay=0.9),
            loader,
            ckpt_path=folder / f"{method}.ckpt",
            weights_only=True,
        )
    return results


def trainer_runs(folder: Path) -> dict[str, Any]:
    """Train with each method, and again from the checkpoint in the middle."""
    from tests.compatibility.test_hugging_face import STEPS, settings_for, trained, trainer_by_optimizers

    results = {}
    for method in METHODS:
        saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
        options = {"per_device_train_batch_size": 1, "ddp_backend": "gloo"}
        settings = settings_for(folder / method, **saving, **options)
        results[method] = trained(trainer_by_optimizers(method, settings, torch.float64))
        dist.barrier()
        again = settings_for(folder / "again", **options)
        checkpoint = folder / method / f"checkpoint-{STEPS // 2}"
        results[f"{method} resumed"] = trained(
            trainer_by_optimizers(method, again, torch.float64),
            resume_from_checkpoint=str(checkpoint),
        )
    return results


def accelerate_runs(folder: Path) -> dict[str, Any]:
    """Train with each method for an epoch, and from its state for another."""
    from tests.compatibility.test_hugging_face import prepared, reset_accelerate, train_accelerated

    results = {}
    for method in METHODS:
        for part in ("first", "second"):
            reset_accelerate()
            options = {"gradient_accumulation_steps": 2, "step_scheduler_with_optimizer": True}
            parts = prepared(method, "no", size=2, dtype=torch.float64, **options)
            if part == "second":
                parts[0].load_state(str(folder / method))
            results[method] = train_accelerated(parts, "norm")
            parts[0].save_state(str(folder / method))
            parts[0].wait_for_everyone()
    return results


CLIENTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "lightning": lightning_runs,
    "trainer": trainer_runs,
    "accelerate": accelerate_runs,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    client, folder = sys.argv[1], Path(sys.argv[2])
    results = CLIENTS[client](folder)
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
