"""Our trainers combined with others by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.names.trainer_name import parse_name
from nnunet_cpr.nnunet.base_trainer import NamedTrainer, kept_names, other_trainer, parts_of
from nnunet_cpr.nnunet.classes import find_trainer, resolve_settings
from nnunet_cpr.nnunet.trainer import trainer_class
from tests.helpers import ROOT
from tests.helpers.nnunet_trainers import NNUNET, NOT_TO_COMBINE, OTHER_PROJECTS, name_on
from tests.helpers.pages import DOCS, blocks
from tests.helpers.workspace import Workspace

MINE = """
from abc import ABC

import os

import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.training.nnUNetTrainer.variants.data_augmentation.nnUNetTrainerDA5 import nnUNetTrainerDA5
from nnunetv2.training.nnUNetTrainer.variants.optimizer.nnUNetTrainerAdam import nnUNetTrainerAdam

from nnunet_cpr.nnunet.trainer import nnUNetTrainerAttachCPR, nnUNetTrainerCPR


class nnUNetTrainerMine(nnUNetTrainerCPR, nnUNetTrainerDA5):
    def __init__(self, plans, configuration, fold, dataset_json, device=torch.device("cuda")):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.initial_lr = 5e-3
        self.num_epochs = 7


class nnUNetTrainerAbstract(nnUNetTrainer, ABC):
    pass


class nnUNetTrainerMyAdam(nnUNetTrainerAttachCPR, nnUNetTrainerAdam):
    pass


class nnUNetTrainerTaking(nnUNetTrainer):
    # An attribute with one of our names.

    def __init__(self, plans, configuration, fold, dataset_json, device=torch.device("cuda")):
        super().__init__(plans, configuration, fold, dataset_json, device)
        setattr(self, os.environ["TAKEN"], [500, 1000])


class nnUNetTrainerWithout(nnUNetTrainerCPR):
    def build_optimizer(self):
        return torch.optim.SGD(self.network.parameters(), self.initial_lr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the trainers of other projects and of a user."""
    made = tmp_path_factory.mktemp("trainers")
    (made / "other_projects.py").write_text(OTHER_PROJECTS)
    (made / "mine.py").write_text(MINE)
    (frozen,) = [b.code for b in blocks(DOCS / "how-to" / "fine-tune.md") if b.language == "python"]
    (made / "frozen.py").write_text(frozen)
    return made


@pytest.fixture(autouse=True)
def _searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(folder), str(ROOT / "trainers")]))


@pytest.mark.parametrize("other", sorted(set(NNUNET) - NOT_TO_COMBINE))
def test_each_trainer_of_nnunet_has_one_name_with_cpr(other: str) -> None:
    found = trainer_class(name_on(other, "_ws50"))
    assert found is not None and issubclass(found, (NamedTrainer, NNUNET[other]))
    assert other_trainer(found) is NNUNET[other]
    assert found.build_network_architecture is NNUNET[other].build_network_architecture
    if name_on(other).startswith("nnUNetTrainerAttachCPR"):
        right = f"builds an optimizer of its own; use nnUNetTrainerAttachCPR_ws50_on_{other}"
        with pytest.raises(WrongName, match=right):
            trainer_class(f"nnUNetTrainerAdamCPR_ws50_warmup9_on_{other}")


@pytest.mark.parametrize("ending", ["", "_on_nnUNetTrainerDA5", "_on_nnUNetTrainerAbstract"])
def test_created_classes_name_a_module_of_this_package(ending: str) -> None:
    created = trainer_class(f"nnUNetTrainerCPR_ws50{ending}")
    assert created is not None and created.__module__ == "nnunet_cpr.nnunet.classes"


def test_documentation_lists_every_trainer_of_nnunet() -> None:
    page = (ROOT / "docs" / "reference" / "nnunet-trainers.md").read_text()
    lists = re.findall(r"^- `(\w+_on_)<Trainer>` .*: (.*)\.$", page, re.M)
    names = {other: ours + other for ours, others in lists for other in re.findall(r"`(\w+)`", others)}
    assert names == {other: name_on(other) for other in set(NNUNET) - NOT_TO_COMBINE}


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("nnUNetTrainer_CPR", "nnUNetTrainerCPR"),
        ("nnUNetTrainer_AdamCPR_ws9", "nnUNetTrainerAdamCPR_ws9"),
        ("nnUNetTrainerCPR_on_nnUNetTrainerDA6", "nnUNetTrainerDA5"),
        ("nnUNetTrainerCPR_on_nnUNetTrainerDA5_ws9", "nnUNetTrainerCPR_ws9_on_nnUNetTrainerDA5"),
        ("nnUNetTrainerCPR_ws_1000", "nnUNetTrainerCPR_ws1000"),
        ("nnUNetTrainerCPR_100_epochs_ws_9", "nnUNetTrainerCPR_100epochs_ws9"),
        ("nnUNetTrainerCPR_mu_2_on_nnUNetTrainerDA5", "nnUNetTrainerCPR_mu2_on_nnUNetTrainerDA5"),
        ("nnUNetTrainerCPR_epochs100", "nnUNetTrainerCPR_100epochs"),
    ],
)  # fmt: skip
def test_right_name_is_given_for_a_wrong_one(name: str, right: str) -> None:
    with pytest.raises(WrongName) as caught:
        find_trainer(name)
    assert str(caught.value).endswith(f"did you mean {right}?")


@pytest.mark.parametrize("suffix", ["_bs4", "_batchsize4", "_patch128"])
def test_settings_of_the_plans_are_no_suffixes(suffix: str) -> None:
    with pytest.raises(
        WrongName, match=f"{suffix} is a setting of nnU-Net's plans; change it in a copy"
    ):
        resolve_settings(f"nnUNetTrainerCPR{suffix}")
    with pytest.raises(WrongName, match="choose from _k<V>"):
        parse_name(RunName, f"SGDCPR{suffix}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nnUNetTrainerCPR_on_nnUNetTrainerNone", "trainer nnUNetTrainerNone not found by nnU-Net"),
        ("nnUNetTrainerCPR_on_DA5", r"DA5 not found by nnU-Net; did you mean nnUNetTrainerDA5\?"),
        ("nnUNetTrainerPlain_on_nnUNetTrainer", r"is the default; use nnUNetTrainerSGD$"),
        ("nnUNetTrainerCPR_on_nnUNetTrainerMine", "derived from nnunet-cpr already"),
        ("nnUNetTrainerSGD_wd1_on_nnUNetTrainerAdam", "use nnUNetTrainerPlain_wd1_on_nnUNetTrainerAdam"),
        ("nnUNetTrainerDA5_ws50", "takes no suffixes; write nnUNetTrainerCPR_ws50_on_nnUNetTrainerDA5"),
        ("nnUNetTrainerMine_wd1", "takes no _wd1"),
        ("nnUNetTrainerDA5_ws50_k0p1", "_ws50 and _k0p1 in 'nnUNetTrainerDA5_ws50_k0p1' contradict"),
        ("nnUNetTrainerMine_ws50_k0p1", "_ws50 and _k0p1 in 'nnUNetTrainerMine_ws50_k0p1' contradict"),
    ],
)  # fmt: skip
def test_wrong_combination_is_corrected_in_one_line(name: str, message: str) -> None:
    with pytest.raises(WrongName, match=message) as caught:
        resolve_settings(name)
    assert "\n" not in str(caught.value)


def test_other_trainers_settings_are_kept(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    built = workspace.build("nnUNetTrainerCPR_ws7_on_nnUNetTrainerUMambaLike", monkeypatch)
    assert (built.initial_lr, built.num_epochs, built.weight_decay) == (5e-3, 1000, 0.0)
    assert type(built.optimizer).__name__ == "SGDCPR" and type(built.network).__name__ == "Small"
    named = workspace.build("nnUNetTrainerSGD_lr1en4_9epochs_on_nnUNetTrainerUMambaLike", monkeypatch)
    assert (named.initial_lr, named.num_epochs, named.weight_decay) == (1e-4, 9, 3e-5)


def test_attached_cpr_replaces_weight_decay_of_parameter_matrices(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "nnUNetTrainerAttachCPR_ws7_on_nnUNetTrainerMedNeXtLike"
    built = workspace.build(name, monkeypatch)
    regularized, others = built.optimizer.param_groups
    assert (regularized["weight_decay"], others["weight_decay"]) == (0.0, 1e-2)
    matrices = [p for p in built.network.parameters() if p.ndim > 1]
    assert [id(p) for p in regularized["params"]] == [id(p) for p in matrices]
    assert len(built.cpr.names) == len(matrices) == 4
    assert (built.initial_lr, built.num_epochs) == (1e-3, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Plain_lr1en3_on_nnUNetTrainerFixedRate", "uses 0p1 in place of _lr1en3; choose"),
        (
            "Plain_wd1en4_on_nnUNetTrainerMedNeXtLike",
            "uses 0p01 in place of _wd1en4; choose _wd<V> accordingly, or leave it out",
        ),
        ("Plain_decoupled_wd1en2_on_nnUNetTrainerMedNeXtLike", ""),
        ("AttachCPR_on_nnUNetTrainerPart", "the optimizer does not have"),
        (
            "AttachCPR_on_nnUNetTrainerLists",
            "expected one optimizer and one schedule from nnUNetTrainerLists, got list and list",
        ),
        ("Plain_seed1_on_nnUNetTrainerAlone", "got AdamW and NoneType; it cannot be combined"),
    ],
)
def test_settings_that_the_other_trainer_ignores_are_refused(
    name: str,
    message: str,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not message:
        workspace.build(f"nnUNetTrainer{name}", monkeypatch)
        return
    with pytest.raises(SystemExit):
        workspace.build(f"nnUNetTrainer{name}", monkeypatch)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nnunet-cpr: nnUNetTrainer{name}: ") and message in line


def test_second_stage_continues_bounds_and_multipliers(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = workspace.build("nnUNetTrainerAttachCPR_ws1_on_nnUNetTrainerStages", monkeypatch)
    first = built.optimizer
    for _ in range(4):
        for p in built.network.parameters():
            p.grad = -p.detach()  # lets them grow
        first.step()
    before = first.state_dict()["cpr"]["state"]
    assert before["kappa"].isfinite().all() and (before["lagrange_multiplier"] > 0).any()
    second, _ = built.configure_optimizers("second")
    assert second is not first and "cpr" not in first.state_dict()
    for key, value in second.state_dict()["cpr"]["state"].items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Muon_lr5en3_warmup3_10epochs_on_nnUNetTrainerLate", "AdamW in place of Muon; build it there"),
        ("SGD_on_nnUNetTrainerLate", "not from configure_optimizers, AdamW in place of SGD"),
        ("CPR_on_nnUNetTrainerLate", "not from configure_optimizers, AdamW in place of SGDCPR"),
        ("AttachCPR_on_nnUNetTrainerLate", "not from configure_optimizers, AdamW in place of SGD"),
        (
            "Plain_lr5en3_20epochs_on_nnUNetTrainer_warmup",
            "of 20 epochs, which ends with a rate of",
        ),
        ("Plain_20epochs_on_nnUNetTrainer_warmup", "choose more epochs"),
        ("Plain_90epochs_on_nnUNetTrainerShort", "uses 5 in place of _90epochs"),
        ("Plain_lr5en3_60epochs_on_nnUNetTrainer_warmup", ""),
        ("Plain_on_nnUNetTrainerLate", ""),
        ("CPR_ws5_3epochs_on_nnUNetTrainerUMambaLike", ""),
    ],
)
def test_setting_that_is_not_in_force_is_refused_before_the_first_step(
    name: str, message: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)

    def begin() -> None:
        built = workspace.build(f"nnUNetTrainer{name}", monkeypatch)
        built.on_train_start()
        built.on_train_epoch_start()

    if not message:
        begin()
        return
    with pytest.raises(SystemExit):
        begin()
    said = [line for line in capsys.readouterr().err.splitlines() if message in line]
    assert len(said) == 1 and said[0].startswith(f"nnunet-cpr: nnUNetTrainer{name}: ")


@pytest.mark.parametrize("name", ["warmup_steps", "total_steps", "epoch_start"])
def test_attributes_of_other_trainers_keep_their_meaning(
    name: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAKEN", name)
    built = workspace.build("nnUNetTrainerCPR_ws5_3epochs_on_nnUNetTrainerTaking", monkeypatch)
    built.on_train_epoch_start()
    assert getattr(built, name) == [500, 1000]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("cpr", "training") else pytest.mark.slow)
        for name in sorted(kept_names(NamedTrainer))
    ],
)
def test_names_of_this_package_on_a_trainer_are_refused(
    name: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In ``__init__``, in the class, and later on the object."""
    monkeypatch.setenv("TAKEN", name)
    refused = f"nnUNetTrainerTaking: the attribute '{name}' has another meaning in nnunet-cpr"
    with pytest.raises(SystemExit):
        workspace.build("nnUNetTrainerCPR_ws5_3epochs_on_nnUNetTrainerTaking", monkeypatch)
    assert refused in capsys.readouterr().err

    monkeypatch.setenv("TAKEN", "no_name_of_ours")
    built = workspace.build("nnUNetTrainerCPR_ws5_3epochs_on_nnUNetTrainerTaking", monkeypatch)
    with pytest.raises(SystemExit):
        setattr(built, name, True)
    assert refused in capsys.readouterr().err

    monkeypatch.setattr(other_trainer(type(built)), name, True, raising=False)
    with pytest.raises(SystemExit):
        workspace.build("nnUNetTrainerCPR_ws5_3epochs_on_nnUNetTrainerTaking", monkeypatch)
    assert refused in capsys.readouterr().err


def test_optimizer_that_is_replaced_later_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = workspace.build("nnUNetTrainerCPR_on_nnUNetTrainerUMambaLike", monkeypatch)
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
    monkeypatch.setattr(type(built), "train_step", lambda trainer, batch: None)
    built.on_train_start()
    built.on_epoch_start()
    built.train_step({})
    built.optimizer = torch.optim.SGD(built.network.parameters(), 0.1)
    built.current_epoch += 1
    built.on_epoch_start()
    with pytest.raises(SystemExit):
        built.train_step({})
    assert "SGD in place of SGDCPR" in capsys.readouterr().err


def test_trainer_with_files_beside_a_checkpoint_saves_as_it_does(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = workspace.build("nnUNetTrainerCPR_on_nnUNetTrainerBeside", monkeypatch)
    built.output_folder = str(tmp_path)
    built.save_checkpoint(str(tmp_path / "checkpoint_best.pth"))
    names = {"checkpoint_best.pth", "checkpoint_best_ema.pth"}
    assert {path.name for path in tmp_path.glob("*.pth")} == names
    built.on_epoch_start()
    assert parts_of(built).saves.policy.copied_epochs is None  # the file beside it would be missing


def test_hand_written_class_keeps_its_settings_unless_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = workspace.build("nnUNetTrainerMine", monkeypatch)
    assert (mine.initial_lr, mine.num_epochs) == (5e-3, 7)
    named = workspace.build("nnUNetTrainerMine_ws50_9epochs", monkeypatch)
    assert (named.initial_lr, named.num_epochs, named.cpr.bound.steps) == (5e-3, 9, 50)
    assert type(named).__name__ == "nnUNetTrainerMine_ws50_9epochs"
    adam = workspace.build("nnUNetTrainerMyAdam_ws50_seed1", monkeypatch)
    assert type(adam.optimizer).__name__ == "AdamW" and adam.settings.seed == 1


def test_optimizer_without_cpr_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        workspace.build("nnUNetTrainerWithout", monkeypatch)
    assert "nnUNetTrainerWithout.build_optimizer: expected SGDCPR, AdamCPR or MuonCPR, got SGD" in (
        capsys.readouterr().err
    )


@pytest.mark.slow  # 6 seconds
def test_wrong_name_ends_the_command_with_one_line(workspace: Workspace) -> None:
    done = workspace.train("nnUNetTrainerCPR_DA5", check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "nnunet-cpr" in line]
    assert lines == done.stderr.splitlines()[-1:] and "nnUNetTrainerCPR_on_nnUNetTrainerDA5" in lines[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nnUNetTrainerCPR_on_nnUNetTrainerTakes", "has another meaning"),  # found by __init__
        ("nnUNetTrainerTimm", "names no optimizer"),  # found as the training starts
    ],
)
def test_refused_start_leaves_no_folder_of_its_own(
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    reason: str,
) -> None:
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "takes.py").write_text(
        "from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer\n\n\n"
        "class nnUNetTrainerTakes(nnUNetTrainer):\n    def cpr(self): ...\n"
    )
    folders = os.pathsep.join([str(tmp_path / "trainers"), os.environ["nnUNet_extTrainer"]])
    monkeypatch.setenv("nnUNet_extTrainer", folders)
    space = workspace.with_results_in(tmp_path)
    results = tmp_path / "nnUNet_results"
    with pytest.raises(SystemExit):
        space.train_here(name)
    assert reason in capsys.readouterr().err
    assert not results.exists()
    other = space.model(name) / "fold_1"
    other.mkdir(parents=True)
    with pytest.raises(SystemExit):
        space.train_here(name)
    assert [*results.rglob("fold_*")] == [other]


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("nnUNetTrainerFrozenStem_ws5", "encoder.stages.0."),
        ("nnUNetTrainerCPR_freezeencoder_ws5", "encoder."),
    ],
)
def test_frozen_matrices_have_no_bound(
    name: str, frozen: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = workspace.build(name, monkeypatch)
    trained = [key for key, p in built.network.named_parameters() if p.requires_grad and p.ndim > 2]
    assert built.cpr.names == trained and not [key for key in trained if key.startswith(frozen)]


def test_freezing_a_network_without_encoder_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nnUNetTrainer, "build_network_architecture", lambda *_: torch.nn.Linear(1, 1))
    with pytest.raises(SystemExit):
        workspace.build("nnUNetTrainerSGD_freezeencoder", monkeypatch)
    assert "expected a network with a part 'encoder', got Linear" in capsys.readouterr().err
