"""nnU-Net's multi-GPU training on CPU processes, with gloo in place of NCCL.

    python gloo_training.py PROCESSES STATES TRAINER PLANS [--c] [--without-validation]

trains fold 0 of the demo's data set through nnU-Net's own ``run_ddp``, and leaves what each process held
at the end in ``STATES/rank_<N>.pth``. What has to be other than on GPUs is in :func:`without_gpus`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from nnunetv2.run import run_training
from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as trainer_module
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from nnunet_cpr import demo
from nnunet_cpr.nnunet.base_trainer import parts_of


class CPUDistributedDataParallel(DistributedDataParallel):
    def __init__(self, module: torch.nn.Module, device_ids: list[int]) -> None:
        super().__init__(module)


def without_gpus() -> list[Any]:
    """Let nnU-Net's multi-GPU code run without GPUs; return the list of its trainers."""
    made: list[Any] = []
    get_trainer = run_training.get_trainer_from_args

    def get_trainer_on_the_cpu(*args: Any, **kwargs: Any) -> Any:
        trainer = get_trainer(*args, **kwargs)
        assert trainer.is_ddp and trainer.device.type == "cuda"
        trainer.device, trainer.grad_scaler = torch.device("cpu"), None
        made.append(trainer)
        return trainer

    run_training.get_trainer_from_args = get_trainer_on_the_cpu
    run_training.setup_ddp = lambda rank, world_size: distributed.init_process_group(
        "gloo", rank=rank, world_size=world_size
    )
    torch.cuda.set_device = lambda device: None
    trainer_module.DDP = CPUDistributedDataParallel
    return made


def train(rank: int, processes: int, states: Path, trainer: str, plans: str, options: list[str]) -> None:
    torch.set_num_threads(1)
    made = without_gpus()
    if "--without-validation" in options:
        trainer_module.nnUNetTrainer.perform_actual_validation = lambda self, save_probabilities: None
    run_training.run_ddp(
        rank,
        demo.DATASET,
        demo.CONFIGURATION,
        fold=0,
        tr=trainer,
        p=plans,
        disable_checkpointing=False,
        c="--c" in options,
        val=False,
        pretrained_weights=None,
        npz=False,
        val_with_best=False,
        world_size=processes,
    )
    (this,) = made
    assert isinstance(this.network, DistributedDataParallel)
    held = {
        "network": this.network.module.state_dict(),
        "optimizer": this.optimizer.state_dict(),
        "writes_history": parts_of(this).progress.history is not None,
        "logged": {key: this.logger.get_value(key, None) for key in ("train_losses", "cpr_active")},
        "batch_size": this.batch_size,
    }
    torch.save(held, states / f"rank_{rank}.pth")


if __name__ == "__main__":
    count, folder, name, identifier, *rest = sys.argv[1:]
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(run_training.find_free_network_port())
    torch.multiprocessing.spawn(
        train, args=(int(count), Path(folder), name, identifier, rest), nprocs=int(count)
    )
