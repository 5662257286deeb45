"""Folds that version 0.3.0 has trained: every family, averaged, extended and fine-tuned trainings.

This module also runs with version 0.3.0 of the package, so it imports the package through nnU-Net only.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.golden.tiny_trainer import build_trainer, nnunet_folders, set_gradients, set_weights

EPOCHS, TRAINED = 4, 2
_LENGTH = "4epochs_12iters"
FOLDS = {
    "sgd": f"nnUNetTrainerSGD_seed1_{_LENGTH}",
    "adamw": f"nnUNetTrainerAdamW_warmup2_{_LENGTH}",
    "cpr": f"nnUNetTrainerCPR_ki0x1_{_LENGTH}",
    "adamcpr": f"nnUNetTrainerAdamCPR_ws3_warmup2_{_LENGTH}",
    "muon": f"nnUNetTrainerMuon_{_LENGTH}",
    "muoncpr": f"nnUNetTrainerMuonCPR_ws3_cooldown50p_{_LENGTH}",
    "amos": f"nnUNetTrainerAMOS_{_LENGTH}",
    "plain": f"nnUNetTrainerPlain_cautious_{_LENGTH}_on_nnUNetTrainerAdam",
    "attachcpr": f"nnUNetTrainerAttachCPR_ws3_ema0p9_{_LENGTH}_on_nnUNetTrainerAdam",
    "timm": f"nnUNetTrainerTimm_lion_{_LENGTH}",
    "timmcpr": f"nnUNetTrainerTimmCPR_nadamw_ws3_{_LENGTH}",
    "averaged": f"nnUNetTrainerSGD_ema0p5_constant_{_LENGTH}",
    "anytime": f"nnUNetTrainerCPR_anytime_ws3_{_LENGTH}",
    "extended": f"nnUNetTrainerAdamCPR_anytime_ws3_warmup2_{_LENGTH}",
    "fine_tuned": f"nnUNetTrainerAdamCPR_k0p1_warmup2_preOne_{_LENGTH}",
}
"""Trainers by the names of their files. ``extended`` was trained two epochs under a shorter name."""

_RECORD = {"path": "/weights.pth", "sha256": "0" * 64}


def write_fold(name: str, file: Path) -> None:
    """Train two epochs of a fold, extend that of the name, and keep its checkpoint."""
    with tempfile.TemporaryDirectory() as folder, without_data(Path(folder)):
        trainer_name = FOLDS[name]
        if name == "extended":
            trainer_name = trainer_name.replace(f"_{EPOCHS}epochs", f"_{TRAINED}epochs")
        trainer = _build(trainer_name)
        set_weights(trainer)
        trainer.on_train_start()
        for _ in range(TRAINED):
            train_epoch(trainer)
        trainer.current_epoch -= 1  # nnU-Net stores the next one
        fold = Path(trainer.output_folder)
        is_extended = name == "extended"
        written = fold / f"checkpoint_{'final' if is_extended else 'latest'}.pth"
        trainer.save_checkpoint(str(written))
        if is_extended:
            target, _ = _extend_model()(fold.parent, EPOCHS, print)
            written = target / "fold_0" / "checkpoint_latest.pth"
        shutil.copyfile(written, file)


def continue_fold(name: str, file: Path) -> dict[str, Any]:
    """Continue a fold to its end; return the weights that validate and those of the checkpoint."""
    with tempfile.TemporaryDirectory() as folder, without_data(Path(folder)):
        trainer = _build(FOLDS[name], continues=True)
        latest = Path(trainer.output_folder) / "checkpoint_latest.pth"
        shutil.copyfile(file, latest)
        trainer.load_checkpoint(str(latest))
        assert trainer.current_epoch == TRAINED
        trainer.on_train_start()
        validated = {
            f"validated {trainer.current_epoch}": train_epoch(trainer) for _ in range(TRAINED, EPOCHS)
        }
        trainer.current_epoch -= 1
        final = latest.with_name("checkpoint_final.pth")
        trainer.save_checkpoint(str(final))
        content = torch.load(final, weights_only=False)
        averaged = content["optimizer_state"].get("training_weights", {}).get("weights", {})
        state = content["optimizer_state"].get("cpr", {"state": {}})["state"]
        return {
            **validated,
            "saved": _numbers(content["network_weights"]),
            "training": _numbers(averaged),
            **{
                key: [float(f"{x:.8g}") for x in state[key].tolist()]
                for key in ("kappa", "lagrange_multiplier")
                if key in state
            },
        }


def load_fold(name: str, file: Path) -> dict[str, Any]:
    """Return the weights with which nnU-Net's ``--val`` predicts."""
    with tempfile.TemporaryDirectory() as folder, without_data(Path(folder)):
        trainer = _build(FOLDS[name])
        trainer.load_checkpoint(str(file))
        found: dict[str, Any] = {}

        def note(trainer: Any, *_: Any) -> None:
            found["validated"] = _numbers(trainer.network.state_dict())

        with _patched("perform_actual_validation", note):
            trainer.perform_actual_validation()
        return found


def _extend_model() -> Any:
    try:
        from nnunet_cpr.nnunet.tools.extend import extend_model
    except ModuleNotFoundError:  # version 0.3.0
        from nnunet_cpr.nnunet.tools.extension import extend_model  # type: ignore
    return extend_model


def _build(name: str, continues: bool = False) -> Any:
    trainer = build_trainer(name, continues)
    if "_pre" in name:
        trainer.my_init_kwargs["nnunet_cpr_pretrained"] = _RECORD
    return trainer


def train_epoch(trainer: Any) -> dict[str, list[float]]:
    """Train an epoch; return the weights that validate."""
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.on_epoch_start()
        trainer.on_train_epoch_start()
        outputs = [trainer.train_step({}) for _ in range(trainer.num_iterations_per_epoch)]
        trainer.on_train_epoch_end(outputs)
        trainer.on_validation_epoch_start()
        found = _numbers(trainer.network.state_dict())
        trainer.on_validation_epoch_end([])
        for key in ("mean_fg_dice", "val_losses"):
            trainer.logger.log(key, 0.5, trainer.current_epoch)
        trainer.logger.log("dice_per_class_or_region", [0.5], trainer.current_epoch)
        trainer.on_epoch_end()
    return found


def _numbers(weights: Any) -> dict[str, list[float]]:
    """Return mean and root mean square of each tensor."""
    # Segmentation heads and others stand in the state dict twice.
    chosen = {name: value.double() for name, value in weights.items() if "all_modules" not in name}
    means = {name: (x.mean().item(), x.square().mean().sqrt().item()) for name, x in chosen.items()}
    return {name: [float(f"{x:.8g}") for x in both] for name, both in means.items()}


def _step(trainer: Any, batch: Any) -> dict[str, Any]:
    taken = trainer.current_epoch * trainer.num_iterations_per_epoch + trainer.steps_of_test
    set_gradients(trainer, taken)
    trainer.optimizer.step()
    trainer.steps_of_test += 1
    return {"loss": np.float32(0.5)}


def _start_epoch(trainer: Any) -> None:
    trainer.steps_of_test = 0
    trainer.lr_scheduler.step(trainer.current_epoch)
    trainer.logger.log("lrs", trainer.optimizer.param_groups[0]["lr"], trainer.current_epoch)


@contextlib.contextmanager
def without_data(folder: Path) -> Iterator[None]:
    """Let nnU-Net's trainer train on given gradients."""
    nothing = lambda trainer, *_: None  # noqa: E731
    with contextlib.ExitStack() as stack:
        stack.enter_context(nnunet_folders(folder))
        for name, method in {
            "do_split": lambda trainer: (["a", "b"], ["c"]),
            "on_train_start": lambda trainer: trainer.do_split(),
            "on_train_epoch_start": _start_epoch,
            "train_step": _step,
            "on_validation_epoch_start": nothing,
            "on_validation_epoch_end": nothing,
        }.items():
            stack.enter_context(_patched(name, method))
        from nnunetv2.training.logging.nnunet_logger import LocalLogger

        stack.enter_context(mock.patch.object(LocalLogger, "plot_progress_png", nothing))
        yield


def _patched(name: str, method: Any) -> Any:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    return mock.patch.object(nnUNetTrainer, name, method)
