"""All that a name trains, with every default spelled out."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nnunet_cpr import KappaWS
from nnunet_cpr.names import BaselineChoice, WarmStartShare, WrongName
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.suffixes import Cooldown
from nnunet_cpr.names.trainer_name import TrainerName, parse_trainer_name
from nnunet_cpr.names.training import (
    ROWS,
    BaseValues,
    Training,
    differences_from_longer,
    resolve,
    titles,
)
from tests.helpers.examples import examples
from tests.names.test_trainer_name import trainer_names

LENGTHS = st.builds(BaseValues, epochs=st.integers(1, 3000), iterations=st.integers(1, 400))
FOLLOWING = ("warmup", "horizon", "kappa", "baseline_steps", "epochs", "steps")
"""Values of a training that may follow its length."""


def _resolve(name: TrainerName, base: BaseValues) -> Training:
    try:
        return resolve(name, base)
    except WrongName:  # a warm-up that is longer
        assume(False)
        raise


@examples(100, search=2000)
@given(trainer_names(), LENGTHS)
def test_name_and_its_printed_form_train_the_same(name: TrainerName, base: BaseValues) -> None:
    parsed = parse_trainer_name(str(name))
    assert parsed is not None and _resolve(parsed, base) == _resolve(name, base)


@examples(100, search=2000)
@given(trainer_names(), LENGTHS, st.integers(1, 50))
def test_what_follows_the_length_grows_with_it(name: TrainerName, base: BaseValues, more: int) -> None:
    name = dataclasses.replace(name, epochs=None)
    shorter = _resolve(name, base)
    longer = _resolve(name, dataclasses.replace(base, epochs=base.epochs + more))
    changed = longer.differences(shorter)
    assert {*changed} <= {*FOLLOWING} and "epochs" in changed
    for field in changed:
        before, after = getattr(shorter, field), getattr(longer, field)
        if field == "kappa":
            before, after = before.earliest, after.earliest
        assert before <= after
    assert {*changed} - {"epochs"} <= {*differences_from_longer(name, shorter)}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (TrainerName("nnUNetTrainerCPR"), ["horizon"]),
        (TrainerName("nnUNetTrainerCPR", schedule="constant"), []),
        (TrainerName("nnUNetTrainerCPR", schedule="constant", epochs=20), ["kappa"]),
        (TrainerName("nnUNetTrainerCPR", schedule="anytime", epochs=20), []),
        (TrainerName("nnUNetTrainerCPR", schedule=Cooldown(20), kappa=KappaWS(50)), ["horizon"]),
        (TrainerName("nnUNetTrainerCPR", kappa=WarmStartShare(2)), ["horizon", "kappa"]),
        (TrainerName("nnUNetTrainerAdamW", epochs=20), ["warmup", "horizon"]),
        (
            TrainerName("nnUNetTrainerSGD", baseline=BaselineChoice("cosine", 0.1)),
            ["horizon", "baseline_steps"],
        ),
        (TrainerName("nnUNetTrainerPlain", on="nnUNetTrainerDA5"), ["horizon"]),
        (TrainerName("nnUNetTrainerPlain", on="nnUNetTrainerDA5", schedule="anytime"), []),
    ],
)
def test_fields_that_follow_the_length(name: TrainerName, changes: list[str]) -> None:
    assert differences_from_longer(name, name.training) == changes


@pytest.mark.parametrize("family", FAMILIES)
def test_every_default_is_spelled_out(family: str) -> None:
    """Each field is in one row, and each row of a family says something or does not apply."""
    described = [field for row in ROWS for field in row.fields]
    assert sorted(described) == sorted(field.name for field in dataclasses.fields(Training))
    training = TrainerName(family).training
    shown = dict(training.rows())
    assert {"family", "learning rate", "length", "weight decay"} <= shown.keys()
    assert ("bound" in shown) == ("regularized" in shown) == FAMILIES[family].cpr
    assert titles(training.differences(training)) == []


def test_training_that_was_extended_keeps_what_it_began_with() -> None:
    name = TrainerName("nnUNetTrainerAdamCPR", epochs=200)
    began_short, began_with_0_2_0 = resolve(name, followed=5000), resolve(name, followed=math.inf)
    assert (began_short.warmup, began_short.kappa, began_short.steps) == (500, KappaWS(1000), 50_000)
    assert (began_with_0_2_0.warmup, began_with_0_2_0.kappa) == (2000, KappaWS(3000))
    share = dataclasses.replace(name, kappa=WarmStartShare(2))
    assert resolve(share, followed=5000).kappa == KappaWS(100)
    assert resolve(share, followed=math.inf).kappa == KappaWS(1000)


def test_lengths_of_the_base_trainer_decide_where_the_name_gives_none() -> None:
    name = TrainerName("nnUNetTrainerAdamCPR", on="nnUNetTrainer_5epochs")
    training = resolve(name, BaseValues(epochs=5))
    assert (training.warmup, training.kappa, training.horizon) == (125, KappaWS(250), 5)
    assert resolve(name, BaseValues(lr=0.02)).lr == 0.02
    with pytest.raises(WrongName, match="not shorter than the training of 1250 steps; choose a shorter"):
        resolve(dataclasses.replace(name, warmup=1250), BaseValues(epochs=5))
