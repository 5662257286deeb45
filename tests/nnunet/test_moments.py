"""Order of a training, whatever derived trainers and those that are combined do.

nnU-Net's trainer trains on given gradients, with a network of a few weights.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nnunetv2.run.run_training import maybe_load_checkpoint

from nnunet_cpr.nnunet.base_trainer import parts_of
from nnunet_cpr.nnunet.parts.average import TRAINING_WEIGHTS
from tests.golden.tiny_trainer import build_trainer, set_weights
from tests.golden.whole_folds import train_epoch, without_data
from tests.helpers import ROOT
from tests.helpers.derived_trainers import DERIVED_TRAINERS, KINDS

LENGTH = "4epochs_12iters"


@pytest.fixture(autouse=True)
def _searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "classes").mkdir()
    (tmp_path / "classes" / "classes.py").write_text(DERIVED_TRAINERS)
    folders = os.pathsep.join(map(str, [tmp_path / "classes", ROOT / "trainers"]))
    monkeypatch.setenv("nnUNet_extTrainer", folders)
    with without_data(tmp_path / "work"):
        yield


def begin(name: str) -> Any:
    trainer = build_trainer(name)
    set_weights(trainer)
    trainer.on_train_start()
    return trainer


def values(network: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in network.parameters()])


def names(kind: str, settings: str) -> list[str]:
    """Return a derived trainer, and one that the name combines, with settings."""
    return [
        f"nnUNetTrainer{kind}ofSGD_{settings}_{LENGTH}",
        f"nnUNetTrainerSGD_{settings}_{LENGTH}_on_nnUNetTrainer{kind}Alone",
    ]


@pytest.mark.parametrize("settings", ["constant", "ema0p9", "anytime"])
def test_weights_that_another_class_loads_or_resets_are_trained(settings: str) -> None:
    for name in names("Loads", settings):
        trainer = begin(name)
        assert (values(trainer.network) == 0.5).all()
        if (averaged := parts_of(trainer).average.weights) is not None:
            assert (values(averaged.network) == 0.5).all()
    for name in names("Resets", settings):
        trainer = begin(name)
        train_epoch(trainer)
        trainer.on_epoch_start()
        assert (values(trainer.network) == 0.25).all()


@pytest.mark.parametrize("name", names("Saves", "ema0p9") + names("Copies", "ema0p9"))
def test_averaged_weights_are_validated_and_saved_wherever_that_is(name: str) -> None:
    trainer = begin(name)
    for _ in range(2):
        network = trainer.network
        train_epoch(trainer)
        assert trainer.network is network, "the network that trains is never another one"
    averaged, trained = parts_of(trainer).average.weights, values(trainer.network)
    assert averaged is not None and not torch.equal(values(averaged.network), trained)
    file = Path(trainer.output_folder) / "checkpoint_latest.pth"
    saved = torch.load(file, weights_only=False)["network_weights"]
    saved = torch.cat([saved[key].flatten() for key, _ in trainer.network.named_parameters()])
    assert torch.equal(saved, values(averaged.network))
    trainer.on_validation_epoch_start()
    assert torch.equal(values(trainer.network), saved)
    trainer.on_epoch_end()
    assert torch.equal(values(trainer.network), trained)


@pytest.mark.parametrize(
    "name",
    [
        f"nnUNetTrainerCopiesofAdam_ws3_warmup9_{LENGTH}",
        f"nnUNetTrainerAdamCPR_ws3_warmup9_{LENGTH}_on_nnUNetTrainerAveragesAlone",
        f"nnUNetTrainerStagesofAdam_ws3_warmup9_{LENGTH}",
        f"nnUNetTrainerSecondofAdam_ws3_warmup9_{LENGTH}",
        f"nnUNetTrainerPlain_cooldown50p_{LENGTH}_on_nnUNetTrainerCentered",
        f"nnUNetTrainerAttachCPR_ws3_cooldown50p_{LENGTH}_on_nnUNetTrainerCentered",
    ],
)
def test_rate_of_each_iteration_follows_epoch_and_iteration(name: str) -> None:
    """Also with steps that call ``super().step()``, without them, and after a second configuration."""
    trainer = begin(name)
    used = []
    for epoch in range(3):
        trainer.on_epoch_start()
        trainer.on_train_epoch_start()
        for iteration in range(12):
            trainer.train_step({})
            expected = trainer.lr_scheduler.rate(12 * epoch + iteration)
            used.append(trainer.optimizer.param_groups[0]["lr"])
            assert used[-1] == pytest.approx(expected)
        trainer.current_epoch += 1
    assert len({*used}) > 10


LIVES = [(kind, settings, 1) for kind in KINDS for settings in ("constant", "ema0p9_constant")]


@pytest.mark.parametrize(
    ("kind", "settings", "stride"),
    [
        ("Averages", "ema0p9_constant", 5),
        ("Side", "constant", 3),
        *(pytest.param(*life, marks=pytest.mark.slow) for life in LIVES),
    ],
)
def test_derived_and_combined_trainers_are_killed_and_continue(
    kind: str, settings: str, stride: int
) -> None:
    """Bit for bit, where nnU-Net saves: with CPR, another optimizer, and with weight decay."""
    ending = f"{settings}_{LENGTH}"
    derived = [f"nnUNetTrainer{kind}{family}_{ending}" for family in ("ofCPR_ws3", "ofSGD")]
    combined = [
        f"nnUNetTrainer{family}_{ending}_on_nnUNetTrainer{kind}Alone"
        for family in ("CPR_ws3", "AttachCPR_ws3", "Plain", "Timm_lion_warmup0")
    ]
    for name in (*derived, *combined)[::stride]:
        whole = begin(name)
        for _ in range(4):
            train_epoch(whole)
        folder = Path(whole.output_folder)
        for file in folder.iterdir():
            file.unlink()
        killed = begin(name)
        for _ in range(2):
            train_epoch(killed)
        if kind == "Copies":  # whose files nothing continues from
            continue
        killed.current_epoch -= 1  # nnU-Net stores the next one
        killed.save_checkpoint(str(folder / "checkpoint_latest.pth"))
        continued = build_trainer(name, continues=True)
        maybe_load_checkpoint(continued, True, False)
        assert continued.current_epoch == 2
        continued.on_train_start()
        if kind == "Loads":  # again, in its own on_train_start
            continue
        for _ in range(2):
            train_epoch(continued)
        assert torch.equal(values(continued.network), values(whole.network)), name
        if "_ema" in name:
            state = continued.optimizer.state_dict()[TRAINING_WEIGHTS]
            assert state["steps"] == 48


def test_freezing_needs_weights_that_were_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where ``--c`` finds no checkpoint, after a kill before the first one."""
    name = f"nnUNetTrainerCPR_ws3_freezeencoder_{LENGTH}"
    for continues in (False, True):
        trainer = build_trainer(name, continues)
        with pytest.raises(SystemExit):
            trainer.on_train_start()
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "_freezeencoder would keep the random weights of the encoder; give -pretrained" in line
    trainer = build_trainer(name)
    trainer.network.load_state_dict(trainer.network.state_dict())
    trainer.on_train_start()
    train_epoch(trainer)
    trainer.current_epoch -= 1
    trainer.save_checkpoint(str(Path(trainer.output_folder) / "checkpoint_latest.pth"))
    continued = build_trainer(name, continues=True)
    maybe_load_checkpoint(continued, True, False)
    continued.on_train_start()


def test_history_goes_back_with_the_training() -> None:
    trainer = begin(f"nnUNetTrainerCPR_ws3_{LENGTH}")
    folder = Path(trainer.output_folder)
    for _ in range(2):
        train_epoch(trainer)
    trainer.current_epoch -= 1
    trainer.save_checkpoint(str(folder / "checkpoint_kept.pth"))
    trainer.current_epoch += 1
    train_epoch(trainer)
    trainer.load_checkpoint(str(folder / "checkpoint_kept.pth"))
    assert trainer.current_epoch == 2
    train_epoch(trainer)
    rows = csv.DictReader((folder / "cpr_history.csv").open())
    count = Counter(row["epoch"] for row in rows)
    assert len({*count.values()}) == 1 and [*count] == ["0", "1", "2"]


def test_moments_that_never_came_are_made_up_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A training loop of its own, which leaves methods out."""
    trainer = build_trainer(f"nnUNetTrainerCPR_ws3_seed1_{LENGTH}")
    trainer.steps_of_test = 0
    trainer.train_step({})
    assert "has not called on_epoch_start" in capsys.readouterr().err
    trainer = build_trainer(f"nnUNetTrainerCPR_ws3_seed1_{LENGTH}")
    train_epoch(trainer)
    assert "has not called on_train_start" in capsys.readouterr().err
    assert (Path(trainer.output_folder) / "nnunet_cpr_run.json").exists()


def test_parts_act_in_their_written_order() -> None:
    trainer = begin(f"nnUNetTrainerCPR_ws3_{LENGTH}")
    order = [type(part).__name__ for part in parts_of(trainer)]
    assert order == [
        "Saves",
        "Seeds",
        "Settings",
        "Weights",
        "Regularization",
        "Schedule",
        "Average",
        "Record",
        "Progress",
    ]


def test_part_is_tested_without_nnunet() -> None:
    """The average of a trainer that is none."""
    from types import SimpleNamespace

    from nnunet_cpr.nnunet.parts.average import Average

    network = torch.nn.Linear(2, 1)
    trainer: Any = SimpleNamespace(
        network=network, is_ddp=False, training=SimpleNamespace(ema=0.5), print_to_log_file=print
    )
    trainer.optimizer = torch.optim.SGD(network.parameters(), 0.1)
    average = Average(trainer, None)
    average.save_with(trainer.optimizer)
    average.start()
    for step in range(20):
        with torch.no_grad():
            network.weight.fill_(step)
        average.update(None)
    with average.bound():
        assert trainer.network is not network
    assert trainer.network is network


def test_compiled_network_is_validated_compiled() -> None:
    """The average is compiled where the network is; checkpoints have neither wrapper."""
    trainer = build_trainer(f"nnUNetTrainerSGD_ema0p9_{LENGTH}")
    network = trainer.network
    trainer.network = torch.compile(network, backend="eager")
    trainer.on_train_start()
    compiled = trainer.network
    averaged = parts_of(trainer).average.weights
    assert averaged is not None
    trainer.on_validation_epoch_start()
    assert trainer.network is not compiled and trainer.network._orig_mod is averaged.network
    trainer.on_validation_epoch_end([])
    assert trainer.network is compiled
    file = Path(trainer.output_folder) / "checkpoint_latest.pth"
    trainer.save_checkpoint(str(file))
    saved = torch.load(file, weights_only=False)
    assert saved["network_weights"].keys() == network.state_dict().keys()
    assert saved["optimizer_state"][TRAINING_WEIGHTS]["weights"].keys() == network.state_dict().keys()


def test_results_and_arguments_of_methods_are_handed_on(tmp_path: Path) -> None:
    trainer = begin(f"nnUNetTrainerAnswersofCPR_ws3_{LENGTH}")
    file = str(tmp_path / "checkpoint.pth")
    train_epoch(trainer)
    assert trainer.on_epoch_end() is False and trainer.perform_actual_validation() == {"Dice": 1}
    assert trainer.save_checkpoint(file, note="kept") == "kept"
    assert trainer.load_checkpoint(file, strict=False) is False
    assert trainer.load_checkpoint(filename=file) is True


@pytest.mark.parametrize("settings", ["ws3_ema0p9", "ws3_freezeencoder", "ws3_preOne"])
def test_own_loop_is_refused_or_has_all_that_its_name_says(
    settings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build_trainer(f"nnUNetTrainerOwnLoopofCPR_{settings}_{LENGTH}")
    folder = Path(trainer.output_folder)
    if settings != "ws3_ema0p9":
        with pytest.raises(SystemExit):
            trainer.run_training()
        assert "; give -pretrained_weights CHECKPOINT" in capsys.readouterr().err
        return
    trainer.run_training()
    assert "has not called on_train_start" in capsys.readouterr().err
    averaged = parts_of(trainer).average.weights
    assert averaged is not None and (folder / "nnunet_cpr_run.json").exists()
    saved = torch.load(folder / "checkpoint_final.pth", weights_only=False)
    name, value = next(iter(averaged.network.state_dict().items()))
    assert torch.equal(saved["network_weights"][name], value)
    assert TRAINING_WEIGHTS in saved["optimizer_state"]


def test_network_that_trains_is_back_after_a_validation_that_fails() -> None:
    trainer = begin(f"nnUNetTrainerFailsofSGD_ema0p9_{LENGTH}")
    network = trainer.network
    trainer.on_validation_epoch_start()
    assert trainer.network is not network
    with pytest.raises(ValueError, match="no memory"):
        trainer.validation_step({})
    assert trainer.network is network


def test_average_goes_back_with_the_training() -> None:
    trainer = begin(f"nnUNetTrainerGoesBackofSGD_ema0p9_{LENGTH}")
    for _ in range(2):
        train_epoch(trainer)
    part, network = parts_of(trainer).average, trainer.network
    assert part.weights is not None
    before = values(network), values(part.weights.network)
    trainer.current_epoch -= 1
    trainer.save_checkpoint(str(Path(trainer.output_folder) / "checkpoint_kept.pth"))
    trainer.current_epoch += 1
    train_epoch(trainer)
    assert trainer.network is network
    assert torch.equal(values(network), before[0])
    assert torch.equal(values(part.weights.network), before[1])


def test_method_that_is_set_on_a_trainer_has_its_moments() -> None:
    for name in (
        f"nnUNetTrainerSetsMethodsofAdam_ws3_warmup24_{LENGTH}",
        f"nnUNetTrainerAdamCPR_ws3_warmup24_{LENGTH}_on_nnUNetTrainerSetsMethodsAlone",
    ):
        trainer = begin(name)
        train_epoch(trainer)
        assert trainer.is_mine and trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_trainer_that_initializes_itself_is_seeded_and_frozen(tmp_path: Path) -> None:
    name = f"nnUNetTrainerCPR_ws3_seed1_{LENGTH}_on_nnUNetTrainerInitializes"
    weights = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        weights.append(values(build_trainer(name).network))
    assert torch.equal(*weights)
    trainer = build_trainer(name.replace("_seed1", "_freezeencoder"))
    trainer.network.load_state_dict(trainer.network.state_dict())
    trainer.on_train_start()


def test_weights_of_the_frozen_part_alone_may_be_loaded() -> None:
    trainer = build_trainer(f"nnUNetTrainerCPR_ws3_freezeencoder_{LENGTH}")
    encoder = trainer.network.encoder
    encoder.load_state_dict({name: value + 1 for name, value in encoder.state_dict().items()})
    trainer.on_train_start()


NAMES = """
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet.trainer import nnUNetTrainerCPR


class nnUNetTrainerTakesName(nnUNetTrainerCPR):
    training = True


class nnUNetTrainerTakesSettings(nnUNetTrainerCPR):
    settings = {"lr": 1}


class nnUNetTrainerSkipsInit(nnUNetTrainerCPR):
    def __init__(self, plans, configuration, fold, dataset_json, device):
        nnUNetTrainer.__init__(self, plans, configuration, fold, dataset_json, device)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TakesName", "the attribute 'training' has another meaning in nnunet-cpr; rename it there"),
        ("TakesSettings", "the attribute 'settings' has another meaning in nnunet-cpr"),
        ("SkipsInit", "its __init__ has to call super().__init__"),
    ],
)
def test_derived_classes_that_take_names_of_ours_end_in_one_line(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "classes" / "names.py").write_text(NAMES)
    with pytest.raises(SystemExit):
        build_trainer(f"nnUNetTrainer{name}")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"nnunet-cpr: nnUNetTrainer{name}: {said}")
