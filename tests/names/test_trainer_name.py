from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.baselines.registry import BASELINES
from nnunet_cpr.cpr.regularizers import REGULARIZERS, Huber
from nnunet_cpr.names import BaselineChoice, WarmStartShare, WrongName
from nnunet_cpr.names.families import FAMILIES, MUON_LR
from nnunet_cpr.names.run_name import RunName, parse_run_name
from nnunet_cpr.names.suffixes import REGULARIZER_WORDS, SUFFIXES, Cooldown
from nnunet_cpr.names.trainer_name import TrainerName, parse_trainer_name
from nnunet_cpr.optimizers.muon import DEFAULT_LR
from tests.helpers.examples import examples

BELOW_ONE = st.floats(0, 1, exclude_min=True, exclude_max=True)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
FLOAT32 = st.floats(1e-30, 1e30)
PERCENT = st.floats(0, 100, exclude_min=True, exclude_max=True)
COUNT = st.integers(1, 10**9 - 1)


@st.composite
def trainer_names(draw: st.DrawFn) -> TrainerName:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    bounds = st.one_of(
        st.builds(KappaK, FLOAT32),
        st.builds(KappaKI0, FLOAT32),
        st.builds(KappaWS, COUNT),
        st.builds(KappaIP, COUNT),
        st.builds(WarmStartShare, PERCENT),
    )
    epochs, iterations = draw(st.none() | COUNT), draw(st.none() | COUNT)
    total = (epochs or 1000) * (iterations or 250)
    with_cpr = FAMILIES[family].cpr
    has_baseline = not with_cpr and family != "nnUNetTrainerAMOS" and draw(st.booleans())
    entry = draw(st.sampled_from(list(BASELINES.values()))) if has_baseline else None
    value = None
    if entry is not None and entry.argument is not None:
        value = draw(COUNT if entry.is_count else POSITIVE)
    decays = not with_cpr and (entry is None or entry.decays)
    # A family's own warm-up may be too long for a short training; then the name must give one.
    needs_warmup = total <= FAMILIES[family].warmup
    keeps_schedule = FAMILIES[family].optimizer == "other"
    warmup = st.none() if keeps_schedule else st.integers(0, min(total, 10**9) - 1)
    optimizer = FAMILIES[family].optimizer
    return TrainerName(
        family,
        timm="sgdw" if optimizer == "timm" else None,
        kappa=draw(st.none() | bounds) if with_cpr else None,
        regularizer=draw(st.sampled_from([None, "l2", "l1", "std", "huber"])) if with_cpr else None,
        mu=draw(st.none() | POSITIVE) if with_cpr else None,
        adaptive=draw(st.booleans()) if with_cpr else False,
        lr=draw(st.none() | POSITIVE),
        momentum=draw(st.none() | BELOW_ONE) if optimizer in ("sgd", "muon", "timm") else None,
        baseline=None if entry is None else BaselineChoice(entry.keyword, value),
        weight_decay=draw(st.none() | st.just(0.0) | POSITIVE) if decays else None,
        warmup=draw(warmup if needs_warmup else st.none() | warmup),
        epochs=epochs,
        iterations=iterations,
        seed=draw(st.none() | st.integers(0, 10**9 - 1)),
        schedule=draw(st.sampled_from([None, "constant"])),
        ema=draw(st.none() | BELOW_ONE),
        freeze=draw(st.sampled_from([None, "encoder"])),
        pretrained=draw(st.sampled_from([None, "Liver", "L2"])),
        on=draw(st.sampled_from([None, "nnUNetTrainerDA5", "nnUNetTrainer_onlyMirror01", "Mine_lr1"])),
    )


@examples(100, search=2000)
@given(trainer_names(), st.randoms())
def test_parse_inverts_str(name: TrainerName, random) -> None:
    printed = str(name)
    assert parse_trainer_name(printed) == name
    assert str(parse_trainer_name(printed)) == printed
    own, ending, other = printed.partition("_on_")
    first = 1 if name.timm is None else 2  # the optimizer of timm follows the family
    family, suffixes = "_".join(own.split("_")[:first]), own.split("_")[first:]
    random.shuffle(suffixes)
    assert parse_trainer_name("_".join([family, *suffixes]) + ending + other) == name


# More wrong names are in tests/golden/trainer_names.py.


def test_documentation_lists_every_suffix() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "reference" / "trainer-names.md").read_text()
    for suffix in SUFFIXES:
        assert f"`{suffix.syntax}`" in text


def test_names_repeat_what_they_cannot_import_without_torch() -> None:
    assert tuple(REGULARIZERS) == REGULARIZER_WORDS and MUON_LR == DEFAULT_LR


SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "timm": st.sampled_from(["lion", "adamw", "nonsense"]),
    "kappa": st.sampled_from([KappaK(0.1), KappaIP(50), KappaIP(50, ema=0.9), KappaWS(10**9), "ws5"])
    | st.builds(WarmStartShare, PERCENT),
    "regularizer": st.sampled_from(["l1", "l3", Huber()]),
    "mu": st.sampled_from([0.5, 1e-3]) | st.floats(),
    "adaptive": st.sampled_from([True, False, None, 0, 1]),
    "baseline": st.builds(
        BaselineChoice, st.sampled_from([*BASELINES, "none"]), st.none() | POSITIVE | COUNT
    ),
    "lr": st.sampled_from([0.5, 1e-3]) | st.floats(),
    "momentum": st.sampled_from([0.5, 1e-3]) | st.floats(),
    "weight_decay": st.sampled_from([0.5, 1e-3]) | st.floats(),
    "warmup": st.integers(-1),
    "seed": st.integers() | st.floats(),
    "schedule": st.sampled_from(["constant", "anytime", "cosine"]) | st.builds(Cooldown, PERCENT),
    "ema": st.sampled_from([0.9, 0.999]) | st.floats(),
    "freeze": st.sampled_from(["encoder", "decoder"]),
    "pretrained": st.sampled_from(["Liver", "L2", "liver", "A_B", "", "é"]),
    "epochs": st.integers(-1),
    "iterations": st.integers() | st.just(2.5),
    "steps": st.integers(-1),
    "on": st.sampled_from(["nnUNetTrainerDA5", "Mine_lr1", "nnUNetTrainerSGD", "", "_A", "A_on_B", "é"]),
}


def test_every_setting_is_among_those_that_are_drawn() -> None:
    assert {field.name for field in dataclasses.fields(TrainerName)} - {"family"} <= SETTINGS.keys()


@examples(300, search=5000)
@given(st.data())
def test_every_value_that_can_be_built_parses_from_its_name(data: st.DataObject) -> None:
    kind: type[TrainerName] = data.draw(st.sampled_from([TrainerName, RunName]))
    family = data.draw(st.sampled_from(sorted(kind.families)))
    own = [field.name for field in dataclasses.fields(kind) if field.name in SETTINGS]
    chosen = data.draw(st.lists(st.sampled_from(own), max_size=3, unique=True))
    settings = {field: data.draw(SETTINGS[field]) for field in chosen}
    if kind.families[family].optimizer == "timm":
        settings.setdefault("timm", "lion")
    try:
        name = kind(family, **settings)
    except WrongName:
        return
    parse = parse_run_name if kind is RunName else parse_trainer_name
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TrainerName("nnUNetTrainer"), "family: unknown 'nnUNetTrainer'; choose from nnUNetTr"),
        (lambda: TrainerName("nnUNetTrainerCPR", lr=-1.0), "lr: expected what a name can express"),
        (lambda: TrainerName("nnUNetTrainerCPR", mu=0.0), "mu: expected what a name can express"),
        (lambda: TrainerName("nnUNetTrainerCPR", regularizer="l3"), "regularizer: expected what"),
        (lambda: TrainerName("nnUNetTrainerCPR", adaptive=None), "adaptive: expected what"),
        (lambda: TrainerName("nnUNetTrainerCPR", epochs=0), "epochs: expected what"),
        (lambda: TrainerName("nnUNetTrainerCPR", seed=-1), "seed: expected what"),
        (lambda: TrainerName("nnUNetTrainerCPR", kappa=KappaIP(10, ema=0.5)), "kappa: expected what"),
        (lambda: TrainerName("nnUNetTrainerCPR", on="nnUNetTrainerSGD"), "on: expected what"),
        (lambda: TrainerName("nnUNetTrainerCPR", timm="lion"), "timm: expected no optimizer for nnU"),
        (lambda: RunName("AdamCPR", lr=-1.0), "lr: expected what a name can express, got -1.0"),
        (lambda: RunName("AdamCPR", epochs=5), "epochs: expected what a name can express, got 5"),
        (lambda: RunName("AdamCPR", on="nnUNetTrainerDA5"), "on: expected what a name can express"),
    ],
)
def test_settings_that_a_name_cannot_express_are_refused(
    build: Callable[[], TrainerName], message: str
) -> None:
    """They would be trained under the name of other settings."""
    with pytest.raises(WrongName, match=f"^{message}"):
        build()
