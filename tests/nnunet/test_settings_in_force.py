"""Each setting of a name is in force in the objects that train, or refused, whatever the other trainer.

Each trainer is built with a stub network, and its schedule followed from epoch to epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.cpr.attachment import attached_method
from nnunet_cpr.cpr.bounds import KappaWS
from nnunet_cpr.cpr.regularizers import REGULARIZERS
from nnunet_cpr.names import BaselineChoice, WrongName
from nnunet_cpr.names.families import FAMILIES as FAMILIES_OF_NAMES
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer, other_trainer, parts_of
from nnunet_cpr.nnunet.classes import find_trainer
from nnunet_cpr.nnunet.parts.average import TRAINING_WEIGHTS
from nnunet_cpr.nnunet.parts.in_force import Trained, unmet_settings, unseen_settings
from nnunet_cpr.nnunet.parts.schedule import ConstantLRScheduler, WarmupPolyLRScheduler
from nnunet_cpr.nnunet.tools import explain_name
from tests.helpers import ROOT
from tests.helpers.nnunet_trainers import NNUNET, OTHER_PROJECTS

ALL = "all"
PUBLISHED: dict[str, tuple[Any, Any]] = {
    "nnUNetTrainerMedNeXtLike": ({"weight_decay", "schedule"}, {"schedule"}),
    "nnUNetTrainerUMambaLike": (set(), set()),
    "nnUNetTrainerStages": (set(), set()),
    "nnUNetTrainerFixedRate": ({"lr", "weight_decay"}, {"lr"}),
    "nnUNetTrainerLate": (ALL, ALL),
    "nnUNetTrainerShort": ({"epochs"}, {"epochs"}),
    "nnUNetTrainerPart": ({"weight_decay"}, ALL),
    "nnUNetTrainerLists": (ALL, ALL),
    "nnUNetTrainerAlone": (ALL, ALL),
    "nnUNetTrainerBeside": (set(), set()),
    "nnUNetTrainerLayers": ({"schedule"}, {"schedule"}),
    "nnUNetTrainerCycle": ({"schedule"}, {"schedule"}),
}
"""Settings that a trainer in the style of another project refuses, without CPR and with it."""

OTHERS = [
    name
    for name, trainer in NNUNET.items()
    if "Benchmark" not in name and not name.startswith("_") and ".pretraining." not in trainer.__module__
]
"""Without benchmarks, which refuse a CPU, classes that a name cannot have, and those that nnU-Net's main
branch has for its command for fine-tuning, which need its plans."""


@dataclasses.dataclass
class Built:
    """A trainer with its optimizer and schedule, after its last epoch."""

    trainer: NamedTrainer
    rates: list[float]  # highest of all parameter groups, of each epoch
    weights: torch.Tensor  # initial ones

    def values(self, key: str) -> set[float]:
        return {group.get(key) for group in self.trainer.optimizer.param_groups}

    @property
    def method(self) -> Any:
        return attached_method(self.trainer.optimizer)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value of a field of ``TrainerName``, the test that it is in force, and its word in refusals."""

    value: Any
    is_in_force: Callable[[Built], bool]
    word: str


SETTINGS = {
    "lr": Setting(5e-3, lambda built: max(built.rates) == pytest.approx(5e-3, rel=1e-3), "_lr5en3"),
    "epochs": Setting(20, lambda built: len(built.rates) == 20 == built.trainer.num_epochs, "epochs"),
    "iterations": Setting(
        7, lambda built: built.trainer.num_iterations_per_epoch == 7, "in place of _7iters"
    ),
    "momentum": Setting(0.8, lambda built: built.values("momentum") == {0.8}, "_momentum0p8"),
    "weight_decay": Setting(1e-4, lambda built: 1e-4 in built.values("weight_decay"), "_wd1en4"),
    "seed": Setting(3, lambda built: torch.equal(built.weights, _seeded(3)), "seed"),
    "kappa": Setting(KappaWS(5), lambda built: built.method.bound == KappaWS(5), "ws5"),
    "regularizer": Setting(
        "l1", lambda built: "l1" in repr(built.method.regularizer).lower(), "regularizer"
    ),
    "mu": Setting(0.5, lambda built: built.method.mu == 0.5, "mu"),
    "schedule": Setting("constant", lambda built: len(set(built.rates)) == 1, "_constant"),
    "freeze": Setting(
        "encoder",
        lambda built: all(
            p.requires_grad == ("encoder" not in name)
            for name, p in built.trainer.network.named_parameters()
        ),
        "_freezeencoder",
    ),
    "ema": Setting(0.5, lambda built: TRAINING_WEIGHTS in built.trainer.optimizer.state_dict(), "_ema"),
}
AS_A_WHOLE = ("it cannot be combined", "; build it there", "the optimizer does not have")
"""Words of the refusals of a trainer with whatever settings."""

ELSEWHERE = {
    "family": "nnunet/test_composition",
    "on": "nnunet/test_composition",
    "timm": "integrations/test_from_timm",
    "adaptive": "golden/test_names",
    "baseline": "golden/test_names",
    "warmup": "nnunet/test_schedules",
    "pretrained": "nnunet/test_pretrained",
}
"""Settings with tests of their own, and their files."""

GENERAL = ("lr", "epochs", "iterations", "seed", "schedule", "ema", "freeze")
FAMILIES = {
    "nnUNetTrainerPlain": (*GENERAL, "weight_decay"),
    "nnUNetTrainerAttachCPR": (*GENERAL, "kappa", "regularizer", "mu"),
    "nnUNetTrainerSGD": (*GENERAL, "momentum", "weight_decay"),
    "nnUNetTrainerCPR": (*GENERAL, "momentum", "kappa", "regularizer", "mu"),
}


def _network() -> torch.nn.Module:
    return explain_name._small_network()


def _seeded(seed: int) -> torch.Tensor:
    """Return the initial weights of a training with a seed."""
    built = _build(str(TrainerName("nnUNetTrainerSGD", seed=seed, epochs=1)))
    return built.weights


def _build(name: str) -> Built:
    trainer = find_trainer(name)
    assert issubclass(trainer, NamedTrainer)
    with contextlib.redirect_stdout(io.StringIO()):
        plans = {**explain_name._PLANS, "continue_training": False}
        built = trainer(plans, "3d_fullres", 0, {**explain_name._DATASET}, torch.device("cpu"))
        network = _network()
        weights = network.encoder.weight.detach().clone()
        build = lambda: setattr(built, "network", network)  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nnUNetTrainer, "initialize", lambda trainer: _initialize(trainer, build))
            patch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
            built.initialize()
            network.load_state_dict(network.state_dict())  # which can be frozen
            built.on_train_start()
        rates = []
        while built.current_epoch < built.num_epochs:
            built.on_epoch_start()
            built.on_train_epoch_start()
            parts_of(built).settings.start_iteration(0)
            rates.append(max(group["lr"] for group in built.optimizer.param_groups))
            if "train_step" in vars(other_trainer(type(built))) and hasattr(
                built.lr_scheduler, "total_steps"
            ):
                for _ in range(built.num_iterations_per_epoch):
                    built.lr_scheduler.step()
                    rates[-1] = max(rates[-1], *(g["lr"] for g in built.optimizer.param_groups))
            built.current_epoch += 1
    return Built(built, rates, weights)


def _initialize(trainer: Any, build: Callable[[], None]) -> None:
    build()
    trainer.optimizer, trainer.lr_scheduler = trainer.configure_optimizers()


@pytest.fixture(autouse=True)
def _searched(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("trainers", numbered=True)
    (folder / "other_projects.py").write_text(OTHER_PROJECTS)
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(folder), str(ROOT / "trainers")]))
    monkeypatch.setenv("nnUNet_results", str(tmp_path))


def _refused(family: str, other: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Build a trainer with all settings except those that it refuses, and return these.

    The others must be in force.
    """
    given, refused = list(FAMILIES[family]), set()
    while True:
        values = {key: SETTINGS[key].value for key in given}
        name = str(TrainerName(family, on=other, **values))
        try:
            built = _build(name)
            break
        except (SystemExit, WrongName) as error:
            said = capsys.readouterr().err or str(error)
        line = said.strip().splitlines()[-1].replace(name, "")
        named = [key for key in given if SETTINGS[key].word in line]
        if not named:
            assert any(words in line for words in AS_A_WHOLE), line
            return ALL
        given.remove(named[0])
        refused.add(named[0])
    ignored = [key for key in given if not SETTINGS[key].is_in_force(built)]
    assert not ignored, f"{name} ignores {ignored}"
    return refused


def _families(other: type[nnUNetTrainer]) -> tuple[str, str]:
    if other.configure_optimizers is nnUNetTrainer.configure_optimizers:
        return "nnUNetTrainerSGD", "nnUNetTrainerCPR"
    return "nnUNetTrainerPlain", "nnUNetTrainerAttachCPR"


@pytest.mark.slow
def test_settings_on_trainers_of_nnunet_are_in_force_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those with 50 epochs of learning-rate warm-up cannot have 20, those with a schedule no other."""
    refusing: dict[str, set[str]] = {"epochs": set(), "schedule": set()}
    for other in OTHERS:
        for family in _families(NNUNET[other]):
            refused = _refused(family, other, capsys)
            for setting in refused:
                refusing[setting].add(other)
    with_warmup = {name for name in OTHERS if "Primus" in name or name.endswith("_warmup")}
    assert refusing["epochs"] == with_warmup and len(OTHERS) > 60
    with_cosine = {name for name in OTHERS if name.endswith("CosAnneal")}
    assert refusing["schedule"] == with_warmup | with_cosine


@pytest.mark.slow
@pytest.mark.parametrize("other", PUBLISHED)
def test_settings_on_published_trainers_are_in_force_or_refused(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    families = _families(find_trainer(other))
    assert tuple(_refused(family, other, capsys) for family in families) == PUBLISHED[other]


def test_every_setting_is_tested() -> None:
    fields = {field.name for field in dataclasses.fields(TrainerName)}
    assert fields == SETTINGS.keys() | ELSEWHERE.keys()
    assert all((ROOT / "tests" / f"{file}.py").exists() for file in ELSEWHERE.values())


VALUES: dict[str, Any] = {
    "timm": "lion",
    "kappa": KappaWS(5),
    "regularizer": "l1",
    "mu": 0.5,
    "adaptive": True,
    "baseline": BaselineChoice("cautious"),
    "lr": 5e-3,
    "momentum": 0.8,
    "weight_decay": 1e-4,
    "warmup": 3,
    "seed": 3,
    "schedule": "constant",
    "ema": 0.5,
    "freeze": "encoder",
    "epochs": 2,
    "iterations": 7,
    "pretrained": "Word",
    "on": "nnUNetTrainerSetsAll",
}
"""A value of each field of a name."""


def _break_cpr(field: str, value: Any) -> Callable[[NamedTrainer], None]:
    def break_(trainer: NamedTrainer) -> None:
        cpr = attached_method(trainer.optimizer)
        cpr.settings[:] = [dataclasses.replace(own, **{field: value}) for own in cpr.settings]

    return break_


def _break_groups(**values: Any) -> Callable[[NamedTrainer], None]:
    return lambda trainer: [group.update(values) for group in trainer.optimizer.param_groups]


def _break_decay(trainer: NamedTrainer) -> None:
    if (method := attached_method(trainer.optimizer)) is not None:
        method.weight_decay = 0.3


def _break_schedule(kind: type, *arguments: Any) -> Callable[[NamedTrainer], None]:
    def break_(trainer: NamedTrainer) -> None:
        trainer.lr_scheduler = kind(trainer.optimizer, *arguments)

    return break_


BROKEN: dict[str, Callable[[NamedTrainer], Any]] = {
    "timm": _break_groups(timm="adopt, timm 1.0"),
    "kappa": _break_cpr("kappa", KappaWS(6)),
    "regularizer": _break_cpr("regularizer", REGULARIZERS["std"]),
    "mu": _break_cpr("mu", 0.25),
    "adaptive": _break_cpr("adaptive", False),
    "lr": _break_schedule(ConstantLRScheduler, 4e-3, 3, 2, 7),
    "momentum": lambda trainer: trainer.optimizer.param_groups[-1].update(momentum=0.7),
    "weight_decay": _break_decay,
    "warmup": _break_schedule(ConstantLRScheduler, 5e-3, 4, 2, 7),
    "schedule": _break_schedule(WarmupPolyLRScheduler, 5e-3, 3, 2, 7),
    "freeze": lambda trainer: trainer.network.encoder.requires_grad_(True),
    "epochs": lambda trainer: setattr(trainer, "num_epochs", 3),
    "iterations": lambda trainer: setattr(trainer, "num_iterations_per_epoch", 8),
}
"""For each field of a name that can be seen, a change of a trainer that puts another value in force."""

APPLIED = {"baseline", "ema", "seed", "pretrained", "on"}
"""Fields that are ours to apply: by hooks of the optimizer, when a training begins, or by the class."""

SETS_ALL = """
import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer


class nnUNetTrainerSetsAll(nnUNetTrainer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.initial_lr, self.weight_decay = 0.02, 1e-4
        self.num_epochs, self.num_iterations_per_epoch = 30, 9

    def initialize(self):
        self.num_epochs = 31 if self.num_epochs == 30 else self.num_epochs
        super().initialize()


class nnUNetTrainerSetsLate(nnUNetTrainer):
    epochs, iterations = 30, 250

    def on_train_start(self):
        super().on_train_start()
        self.num_epochs, self.num_iterations_per_epoch = self.epochs, self.iterations


class nnUNetTrainerSetsBothLate(nnUNetTrainerSetsLate):
    epochs, iterations = 1000, 9
"""


def _fields(family: str) -> list[str]:
    """Return the fields that names of a family can give, one weight decay apart from its methods."""
    timm = {"timm": "lion"} if FAMILIES_OF_NAMES[family].optimizer == "timm" else {}

    def takes(field: str) -> bool:
        try:
            TrainerName(family, **{**timm, field: VALUES[field], "iterations": 250})
        except WrongName:
            return False
        return True

    taken = [
        field for field in VALUES if field not in ("pretrained", "on", "iterations") and takes(field)
    ]
    return [*taken, "iterations"]


@pytest.mark.parametrize("base", [None, "nnUNetTrainerSetsAll"])
@pytest.mark.parametrize("family", FAMILIES_OF_NAMES)
def test_every_setting_of_every_family_is_in_force_and_seen(
    family: str, base: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table that the code uses finds each change that puts another value in force."""
    pytest.importorskip("pytorch_optimizer" if family.endswith("AMOS") else "torch")
    (tmp_path / "sets_all.py").write_text(SETS_ALL)
    folders = os.environ["nnUNet_extTrainer"]
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(tmp_path), folders]))
    fields = _fields(family)
    assert {"lr", "seed", "schedule", "ema", "freeze", "epochs", "iterations"} <= {*fields}
    name = TrainerName(family, on=base, **{field: VALUES[field] for field in fields})
    built = _build(str(name)).trainer
    built.current_epoch = 0
    trained = Trained(built, other_trainer(type(built)), built.optimizer, frozenset({1e-4}))
    assert not [*unmet_settings(trained, False)] and not unseen_settings(trained)
    for field in fields:
        assert getattr(built.training, field) == VALUES[field]
        if field in APPLIED:
            continue
        BROKEN[field](built)
        trained = dataclasses.replace(trained, given_decays=frozenset({0.3}))
        problems = " ".join(unmet_settings(trained, False))
        assert f"in place of _{name.tokens().get(field, name.timm)};" in problems, (field, problems)


@pytest.mark.parametrize(
    ("name", "epochs", "words"),
    [
        ("nnUNetTrainerSGD_on_nnUNetTrainerSetsAll", 31, None),
        ("nnUNetTrainerCPR_constant_on_nnUNetTrainerSetsLate", None, "built for 1,000 epochs"),
        ("nnUNetTrainerCPR_ws9_constant_on_nnUNetTrainerSetsLate", 30, None),
        ("nnUNetTrainerAttachCPR_ws9_on_nnUNetTrainerSetsLate", 30, None),
        ("nnUNetTrainerCPR_ws9_on_nnUNetTrainerSetsLate", None, "now it has 30 of 250"),
        ("nnUNetTrainerCPR_ws9_30epochs_on_nnUNetTrainerSetsLate", 30, None),
        (
            "nnUNetTrainerCPR_ws9_constant_on_nnUNetTrainerSetsBothLate",
            None,
            "now it has 1000 of 9",
        ),
        ("nnUNetTrainerCPR_40epochs_on_nnUNetTrainerSetsLate", None, "uses 30 in place of _40epochs"),
    ],
)
def test_length_is_that_of_the_trainer_or_the_training_ends(
    name: str,
    epochs: int | None,
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Base trainers set it in ``__init__``, ``initialize`` and ``on_train_start``."""
    (tmp_path / "sets_all.py").write_text(SETS_ALL)
    folders = os.environ["nnUNet_extTrainer"]
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(tmp_path), folders]))
    if words is None:
        built = _build(name).trainer
        assert built.training.epochs == built.num_epochs == epochs
        return
    with pytest.raises(SystemExit):
        _build(name)
    assert words in capsys.readouterr().err


OWN_CLASSES = """
import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet.trainer import nnUNetTrainerAttachCPR, nnUNetTrainerCPR


class WithNone(torch.optim.SGD):
    closure = None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.foreach = None  # as all optimizers of pytorch-optimizer have


class nnUNetTrainerOwnSGD(nnUNetTrainerCPR):
    kind = torch.optim.SGD

    def configure_optimizers(self):
        optimizer = self.kind(self.network.parameters(), self.initial_lr)
        return optimizer, PolyLRScheduler(optimizer, self.initial_lr, self.num_epochs)


class nnUNetTrainerOwnNone(nnUNetTrainerOwnSGD):
    kind = WithNone


class nnUNetTrainerOwnAttached(nnUNetTrainerAttachCPR):
    configure_optimizers = nnUNetTrainerOwnSGD.configure_optimizers
    kind = torch.optim.SGD


class Ramp(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, first, end, lr):
        self.first, self.end, self.highest = first, end, lr
        super().__init__(optimizer)

    def step(self, epoch=0):
        share = (1 + (epoch or 0) - self.first) / (self.end - self.first)
        for group in self.optimizer.param_groups:
            group["lr"] = self.highest * min(max(share, 0.1), 1)


class nnUNetTrainerThawing(nnUNetTrainer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.num_epochs, self.thawed = 4, False

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.network.parameters(), self.initial_lr)
        return optimizer, Ramp(optimizer, 0, 2, self.initial_lr)

    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.lr_scheduler = Ramp(self.optimizer, 2, 4, self.initial_lr)
        super().on_train_epoch_start()
"""


@pytest.fixture
def own_classes(_searched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_classes.py").write_text(OWN_CLASSES)
    folders = os.environ["nnUNet_extTrainer"]
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(folder), folders]))


@pytest.mark.parametrize("suffixes", ["", "_ws3_9epochs_5iters", "_ema0p5_9epochs"])
@pytest.mark.parametrize(
    "name", ["nnUNetTrainerOwnSGD", "nnUNetTrainerOwnNone", "nnUNetTrainerOwnAttached"]
)
@pytest.mark.usefixtures("own_classes")
def test_class_that_would_train_without_cpr_is_refused(
    name: str, suffixes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _build(name + suffixes)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{name}{suffixes}: its configure_optimizers does not call that of nnUNetTrainer" in line


@pytest.mark.usefixtures("own_classes")
def test_schedule_that_begins_later_does_not_end_a_training_whose_name_sets_none() -> None:
    built = _build("nnUNetTrainerAttachCPR_ws3_on_nnUNetTrainerThawing")
    assert built.rates == pytest.approx([0.005, 0.01, 0.005, 0.01])


@pytest.mark.parametrize(
    "family",
    ["nnUNetTrainerSGD", "nnUNetTrainerAdamW", "nnUNetTrainerMuon", "nnUNetTrainerTimm_lion"],
)
def test_weight_decay_of_a_family_is_in_force(family: str) -> None:
    assert 1e-4 in _build(f"{family}_wd1en4_2epochs").values("weight_decay")


def test_additional_decay_of_amos_is_in_force() -> None:
    pytest.importorskip("pytorch_optimizer")
    built = _build("nnUNetTrainerAMOS_wd1en4_2epochs")
    assert built.method.weight_decay == 1e-4 and _build("nnUNetTrainerAMOS_2epochs").method is None


@pytest.mark.parametrize("base", ["", "_on_nnUNetTrainer_5epochs"])
def test_warmup_into_the_cooldown_is_refused(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the length of the other trainer, too."""
    epochs = "" if base else "_5epochs"
    with pytest.raises((SystemExit, WrongName)) as refusal:
        _build(f"nnUNetTrainerAdamCPR_cooldown50p_warmup800{epochs}{base}")
    said = capsys.readouterr().err or str(refusal.value)
    assert "1250 steps before its cooldown of 50 %" in said and "choose" in said
