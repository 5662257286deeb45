from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.baselines.registry import BASELINES
from nnunet_cpr.names import BaselineChoice, WarmStartShare, WrongName
from nnunet_cpr.names.suffixes import REGULARIZER_WORDS
from nnunet_cpr.names.trainer_name import FAMILIES, MUON_LR, SUFFIXES, TrainerName, parse_trainer_name
from nnunet_cpr.optimizers.muon import DEFAULT_LR
from nnunet_cpr.regularizers import REGULARIZERS
from tests.helpers.examples import examples

BELOW_ONE = st.floats(0, 1, exclude_min=True, exclude_max=True)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
FLOAT32 = st.floats(1e-30, 1e30)
COUNT = st.integers(1, 10**9 - 1)


@st.composite
def trainer_names(draw: st.DrawFn) -> TrainerName:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    bounds = st.one_of(
        st.builds(KappaK, FLOAT32),
        st.builds(KappaKI0, FLOAT32),
        st.builds(KappaWS, COUNT),
        st.builds(KappaIP, COUNT),
        st.builds(WarmStartShare, st.floats(0, 100, exclude_min=True, exclude_max=True)),
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


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("nnUNetTrainerCPR", {}),
        (
            "nnUNetTrainerCPR_ws2000_warmup2000_100epochs",
            {"kappa": KappaWS(2000), "warmup": 2000, "epochs": 100},
        ),
        ("nnUNetTrainerAdamCPR_k0p005_mu0p5", {"kappa": KappaK(0.005), "mu": 0.5}),
        (
            "nnUNetTrainerCPR_ki0x1p5_std_ada",
            {"kappa": KappaKI0(1.5), "regularizer": "std", "adaptive": True},
        ),
        ("nnUNetTrainerCPR_ip200_lr1en3", {"kappa": KappaIP(200), "lr": 1e-3}),
        (
            "nnUNetTrainerSGD_wd3en5_50iters_seed7",
            {"weight_decay": 3e-5, "iterations": 50, "seed": 7},
        ),
        ("nnUNetTrainerAdamW_wd0", {"weight_decay": 0.0}),
        ("nnUNetTrainerSGD_momentum0p9", {"momentum": 0.9}),
        (
            "nnUNetTrainerSGD_adadecay4_wd1en3",
            {"baseline": BaselineChoice("adadecay", 4.0), "weight_decay": 1e-3},
        ),
        ("nnUNetTrainerAdamW_awd", {"baseline": BaselineChoice("awd")}),
        ("nnUNetTrainerCPR_ws2p", {"kappa": WarmStartShare(2)}),
        ("nnUNetTrainerCPR_ws0p5p", {"kappa": WarmStartShare(0.5)}),
        ("nnUNetTrainerSGD_norm1", {"baseline": BaselineChoice("norm", 1.0)}),
        ("nnUNetTrainerSGD_normws200", {"baseline": BaselineChoice("normws", 200)}),
        ("nnUNetTrainerSGD_hyperball", {"baseline": BaselineChoice("hyperball")}),
        ("nnUNetTrainerAMOS_wd0p1", {"weight_decay": 0.1}),
        (
            "nnUNetTrainerCPR_ws50_on_nnUNetTrainer_onlyMirror01",
            {"kappa": KappaWS(50), "on": "nnUNetTrainer_onlyMirror01"},
        ),
        ("nnUNetTrainerAttachCPR_mu2_on_nnUNetTrainerAdam", {"mu": 2.0, "on": "nnUNetTrainerAdam"}),
    ],
)
def test_parse_returns_settings(text: str, settings: dict) -> None:
    assert parse_trainer_name(text) == TrainerName(text.split("_")[0], **settings)


@pytest.mark.parametrize("value", [1e-5, 1e-3, 0.005, 0.01, 0.1, 0.5, 1.0, 10.0, 1e6, 2.5e-4])
def test_numbers_are_spelt_as_in_nnunet(value: float) -> None:
    spelt = {1e-5: "1en5", 1e-3: "1en3", 0.005: "5en3", 0.01: "0p01", 0.1: "0p1", 0.5: "0p5"}
    spelt |= {1.0: "1", 10.0: "10", 1e6: "1e6", 2.5e-4: "2p5en4"}
    assert str(TrainerName("nnUNetTrainerCPR", lr=value)) == f"nnUNetTrainerCPR_lr{spelt[value]}"


def test_defaults_are_those_of_the_paper() -> None:
    assert parse_trainer_name("nnUNetTrainerCPR").bound == KappaWS(1000)
    assert parse_trainer_name("nnUNetTrainerAdamCPR").bound == KappaWS(3000)
    assert parse_trainer_name("nnUNetTrainerAdamCPR_warmup500").bound == KappaWS(1000)
    assert parse_trainer_name("nnUNetTrainerAdamCPR").warmup_steps == 2000
    assert parse_trainer_name("nnUNetTrainerMuonCPR_warmup100").bound == KappaWS(200)
    assert parse_trainer_name("nnUNetTrainerAdamCPR_ws4000").bound == KappaWS(4000)
    assert parse_trainer_name("nnUNetTrainerSGD_100epochs").total_steps == 25_000


@pytest.mark.parametrize(
    ("text", "steps"),
    [("ws2p", 5000), ("ws0p5p", 1250), ("ws2p_100epochs", 500), ("ws50p_1epochs_3iters", 2)],
)
def test_warm_start_share_follows_the_length(text: str, steps: int) -> None:
    name = parse_trainer_name(f"nnUNetTrainerCPR_{text}")
    assert name.bound == name.cpr_settings["kappa"] == KappaWS(steps)
    assert name.bound_for(100) == name.kappa.resolve(100)


def test_warm_start_share_is_at_least_one_step() -> None:
    assert WarmStartShare(0.001).resolve(100) == KappaWS(1)


@pytest.mark.parametrize("text", ["nnUNetTrainer", "nnUNetTrainerDA5", "nnUNetTrainerMine", "x", ""])
def test_names_of_other_trainers_return_none(text: str) -> None:
    assert parse_trainer_name(text) is None


# More wrong names are in tests/golden/trainer_names.py.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nnUNetTrainerCPR_warmStart100", "did you mean nnUNetTrainerCPR_ws100?"),
        ("nnunettrainercpr", "did you mean nnUNetTrainerCPR?"),
        ("nnUNetTrainerCPR_WS50_on_A", "did you mean nnUNetTrainerCPR_ws50_on_A?"),
        ("nnUNetTrainerAtachCPR_on_A", "did you mean nnUNetTrainerAttachCPR_on_A?"),
        ("nnUNetTrainerCPR_DA5_ws5", "such as nnUNetTrainerCPR_ws5_on_nnUNetTrainerDA5"),
        ("nnUNetTrainerCPR_onlyMirror01", "such as nnUNetTrainerCPR_on_nnUNetTrainer_onlyMirror01"),
        ("nnUNetTrainerCPR_on_A_on_B", "expected the class name of a trainer after _on_"),
        ("nnUNetTrainerCPR_on__Primus_S", "expected the class name of a trainer after _on_"),
        (
            "nnUNetTrainerPlain_warmup9_on_A",
            "keeps the base trainer's learning rates and takes no _warm",
        ),
        ("nnUNetTrainerPlain_momentum0p9_on_A", "does not build SGD or Muon and takes no _momentum0p9"),
        ("nnUNetTrainerCPR_lr.001", "did you mean nnUNetTrainerCPR_lr0p001?"),
        ("nnUNetTrainerCPRMuon_ws9", "did you mean nnUNetTrainerMuonCPR_ws9?"),
        ("nnUNetTrainerCPR_k1en60", "expected a positive number in the range of float32"),
        ("nnUNetTrainerCPR_", "choose from _k<V> _ki0x<V> _ws<N> _ip<N>"),
        ("nnUNetTrainerCPR_ws0p", "percent: expected a positive finite number, got 0"),
        ("nnUNetTrainerCPR_WS2p", "did you mean nnUNetTrainerCPR_ws2p?"),
        ("nnUNetTrainerSGD_normws1p5", "write it as _normws<N>, where <N> is a whole number"),
        ("nnUNetTrainerSGD_hyperball_wd0p1", "has no decay beside _hyperball and takes no _wd0p1"),
        ("nnUNetTrainerCPR_lr1e999", "lr: expected a positive finite number, got inf"),
        ("nnUNetTrainerMuon_ada", "use nnUNetTrainerMuonCPR or leave it out"),
        ("nnUNetTrainerAMOS_ws100", "trains without CPR and takes no _ws100; leave it out"),
    ],
)
def test_wrong_names_are_refused_with_a_correction(text: str, message: str) -> None:
    with pytest.raises(WrongName, match=message.replace("?", r"\?").replace("(", r"\(")):
        parse_trainer_name(text)


def test_documentation_lists_every_suffix() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "reference" / "trainer-names.md").read_text()
    for suffix in SUFFIXES:
        assert f"`{suffix.syntax}`" in text


def test_names_repeat_what_they_cannot_import_without_torch() -> None:
    assert tuple(REGULARIZERS) == REGULARIZER_WORDS and MUON_LR == DEFAULT_LR
