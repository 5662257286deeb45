"""Defaults of names that follow the length of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nnunetv2.run.run_training import maybe_load_checkpoint
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.cpr.bounds import KappaWS
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.nnunet.parts.settings import FOLLOWED
from tests.golden.tiny_trainer import build_trainer, nnunet_folders

SHORT = "nnUNetTrainerAdamCPR_20epochs"  # 5,000 steps


@pytest.mark.parametrize(
    ("name", "warmup", "steps"),
    [
        ("nnUNetTrainerCPR", 0, 1000),
        ("nnUNetTrainerCPR_100epochs", 0, 1000),
        ("nnUNetTrainerCPR_10epochs", 0, 100),
        ("nnUNetTrainerCPR_2epochs_5iters", 0, 1),
        ("nnUNetTrainerCPR_ws1000_10epochs", 0, 1000),
        ("nnUNetTrainerCPR_anytime_10epochs", 0, 1000),
        ("nnUNetTrainerAdamCPR", 2000, 3000),
        ("nnUNetTrainerAdamCPR_100epochs", 2000, 3000),
        ("nnUNetTrainerAdamCPR_20epochs", 500, 1000),
        ("nnUNetTrainerMuonCPR_warmup400_20epochs", 400, 800),
        ("nnUNetTrainerAdamCPR_anytime_20epochs", 2000, 3000),
    ],
)
def test_defaults_follow_the_documented_rule(name: str, warmup: int, steps: int) -> None:
    settings = parse_trainer_name(name)
    assert settings is not None
    assert (settings.training.warmup, settings.training.kappa) == (warmup, KappaWS(steps))


@pytest.mark.parametrize("is_old", [True, False])
def test_training_continues_with_the_defaults_that_it_began_with(
    is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of version 0.2.0 do not say which; theirs ignored the length."""
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
    with nnunet_folders(tmp_path):
        trainer = build_trainer(SHORT.replace("20epochs", "warmup2000_20epochs") if is_old else SHORT)
        if is_old:
            del trainer.my_init_kwargs[FOLLOWED]
        state = trainer.optimizer.state_dict()["cpr"]["config"]
        folder = Path(trainer.output_folder.replace(type(trainer).__name__, SHORT))
        folder.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(str(folder / "checkpoint_latest.pth"))

        said: list[Any] = []
        for _ in range(2):  # what is continued can be continued again
            continued = build_trainer(SHORT, continues=True)
            maybe_load_checkpoint(continued, True, False)
            continued.print_to_log_file = lambda *text, **_: said.append(text[0])
            continued.on_train_start()
            assert continued.optimizer.state_dict()["cpr"]["config"] == state
            assert continued.lr_scheduler.warmup == (2000 if is_old else 500)
            continued.save_checkpoint(str(folder / "checkpoint_latest.pth"))
    begun = [text for text in said if text.startswith(f"{SHORT} trains")]
    warmup, bound = ("2,000", "3,000") if is_old else ("500", "1,000")
    assert len(begun) == 2
    for text in begun:
        assert f"linear warm-up over {warmup} steps" in text and f"set at step {bound}," in text
