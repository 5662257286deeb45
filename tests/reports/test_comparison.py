"""Comparisons of trainers, from the cases of their runs to verdicts and sentences."""

import json
import math
import os

import numpy as np
import pytest
import torch
from scipy.stats import wilcoxon

from benchmarks.study_statistics import PARTS, SCENARIOS, claims_by_parts, shown, simulate, verdicts
from nnunet_cpr.nnunet.fold_files import PRETRAINED
from nnunet_cpr.reports.comparison import judge
from nnunet_cpr.reports.comparison_tables import non_inferiority_table
from nnunet_cpr.reports.over_datasets import judge_scopes
from nnunet_cpr.reports.pairing import compare_with
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.selection import choose_compared
from nnunet_cpr.reports.tables import shown_main_table
from nnunet_cpr.reports.words import answers, find_warnings, fold_notes, sentence
from nnunet_cpr.studies.study import TrainerEntry
from tests.reports.folds import NAN, both, study, write_fold, write_history, write_json

SGD, CPR, ADAM = "nnUNetTrainerSGD", "nnUNetTrainerCPR", "nnUNetTrainerAdamW"
SEEDS = (1, 2, 3)


def write_runs(results, trainer, values, **changes):
    """Write a run for each seed and fold; ``values`` is {seed: {fold: [Dice of each case]}}."""
    for seed, folds in values.items():
        name = trainer if seed is None else f"{trainer}_seed{seed}"
        for fold, dice in folds.items():
            cases = {f"case_{fold}_{i:02}": both(value) for i, value in enumerate(dice)}
            write_fold(results, name, fold, cases, **changes)


def noisy(mean, seeds=SEEDS, folds=(0, 1), cases=12, training=0.002, residual=0.005, key=0):
    """Return Dice values of runs around a mean, with cases of different difficulty."""
    rng = np.random.default_rng([key, round(1e6 * mean)])
    hard = {fold: np.random.default_rng(fold).uniform(-0.2, 0.1, cases) for fold in folds}

    def values(fold):
        noise = rng.normal(0, training) + rng.normal(0, residual, cases)
        return np.clip(mean + hard[fold] + noise, 0, 1)

    return {seed: {fold: values(fold) for fold in folds} for seed in seeds}


def compared(results, *trainers, reference="", **changes):
    """Return the comparisons by trainer."""
    planned = study(*(trainers or (SGD, CPR)), **{"seeds": SEEDS, **changes})
    chosen = choose_compared(read_results(planned, results).by_condition()[0])
    comparisons = compare_with([chosen], reference or planned.reference)
    return {each.entry.key: each for each in judge(comparisons)}


def test_networks_of_one_trainer_are_compared(tmp_path):
    """The cases are the same, whatever the plans."""
    folds, larger = (0, 1, 2), "nnUNetResEncUNetMPlans"
    write_runs(tmp_path, SGD, noisy(0.8, folds=folds))
    write_runs(tmp_path, SGD, noisy(0.82, folds=folds), plans=larger)
    write_runs(tmp_path, CPR, noisy(0.8, folds=folds, key=1), plans=larger)
    entries = [SGD, *(TrainerEntry(each, plans=larger) for each in (SGD, CPR))]
    found = compared(tmp_path, *entries, folds=folds)
    assert {key: each.verdict for key, each in found.items()} == {
        f"{SGD}, {larger}": "better",
        f"{CPR}, {larger}": "undecided",
    }
    assert sentence(found[f"{SGD}, {larger}"]).count(larger) == 1
    assert not fold_notes(list(found.values()))
    wide = compared(tmp_path, *entries)
    assert "a third fold narrows them" in fold_notes(list(wide.values()))[0]


def test_clear_difference_is_better_or_worse(tmp_path):
    folds = (0, 1, 2)
    write_runs(tmp_path, SGD, noisy(0.8, folds=folds))
    write_runs(tmp_path, CPR, noisy(0.82, folds=folds))
    found = compared(tmp_path, folds=folds)[CPR]
    assert found.verdict == "better" and found.difference == pytest.approx(2, abs=0.5)
    n = found
    assert (n.folds, n.seeds, n.cases) == ([0, 1, 2], [1, 2, 3], 36)
    low, high = found.interval
    interval = f"{low:.2f} to {high:.2f}"
    numbers = f"{found.difference:.2f} points better, 95 % interval {interval}"
    assert sentence(found).startswith(f"{CPR} instead of {SGD}: {numbers} (p ")
    turned = compared(tmp_path, reference=CPR, folds=folds)[SGD]
    assert turned.verdict == "worse" and turned.difference == -found.difference
    assert numbers.replace("better", "worse") in sentence(turned)


def test_noise_between_trainings_is_undecided(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8, training=0.01, key=1))
    write_runs(tmp_path, CPR, noisy(0.8, training=0.01, key=2))
    found = compared(tmp_path)[CPR]
    assert found.verdict == "undecided" and "; not statistically significant (p = " in sentence(found)
    assert " worse to " in sentence(found) and "no difference" not in sentence(found).lower()


def test_small_difference_within_the_margin_is_equivalent(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8, training=0, residual=0.0002, key=1))
    write_runs(tmp_path, CPR, noisy(0.8, training=0, residual=0.0002, key=2))
    found = compared(tmp_path, margin=0.25)[CPR]
    assert found.verdict == "equivalent" and "equivalent within 0.25 points. Cases" in sentence(found)


@pytest.mark.parametrize(("seeds", "folds"), [((1, 2), (0, 1)), (SEEDS, (0,))])
def test_few_seeds_or_folds_have_no_verdict(tmp_path, seeds, folds):
    write_runs(tmp_path, SGD, noisy(0.8, seeds, folds))
    write_runs(tmp_path, CPR, noisy(0.9, seeds, folds))
    found = compared(tmp_path, seeds=seeds, folds=folds)[CPR]
    assert found.tests[0].p < 0.05 and found.verdict == "no verdict" and not found.is_non_inferior
    assert f"no verdict with {len(seeds)} seeds and {len(folds)} fold" in sentence(found)


def write_absent(results, gain):
    """Write runs of which only CPR marks the structure in the cases without it."""
    for trainer, dice in {SGD: NAN, CPR: 0.0}.items():
        for seed, folds in noisy(0.8 + gain * (trainer == CPR), folds=(0, 1, 2), cases=6).items():
            for fold, values in folds.items():
                cases = {f"c{fold}{i}": {"1": value} for i, value in enumerate(values)}
                cases |= {f"e{fold}{i}": {"1": dice} for i in range(6)}
                write_fold(results, f"{trainer}_seed{seed}", fold, cases)


def test_false_positives_in_empty_cases_count_in_the_difference(tmp_path):
    """The trainer that marks nothing is right."""
    write_absent(tmp_path, gain=-0.05)
    c = compared(tmp_path, folds=(0, 1, 2))[CPR]
    assert c.verdict == "worse" == c.without_marked.verdict and c.cases_marked == 18
    assert c.gain == pytest.approx(-52, abs=1) and c.cases_left_out == 0
    assert "; the same without 18 cases of absent structures" in sentence(c)


def test_verdict_that_absent_structures_decide_is_undecided(tmp_path):
    """The better trainer in cases with a structure predicts it in all cases without one."""
    write_absent(tmp_path, gain=0.05)
    c = compared(tmp_path, folds=(0, 1, 2))[CPR]
    assert (c.verdict, c.verdict_with_marked) == ("undecided", "worse")
    assert c.without_marked.verdict == "better"
    assert "it would be worse with and better without the 18 cases in which only one" in sentence(c)
    assert not c.is_non_inferior


def test_identical_results_of_two_seeds_are_named(tmp_path):
    """As of a copied folder."""
    runs = noisy(0.8)
    runs[3] = runs[1]
    write_runs(tmp_path, SGD, runs)
    (part,) = read_results(study(SGD, seeds=SEEDS), tmp_path).by_condition()
    warned = [line for line in find_warnings(part) if "the same Dice in all cases" in line]
    assert [line.partition(" have")[0] for line in warned] == [
        f"{SGD}, fold {fold}: seeds 1 and 3" for fold in (0, 1)
    ]


def test_worse_trainers_come_first_in_words(tmp_path):
    others = [f"{CPR}_lr{n}en3" for n in range(1, 9)]
    write_runs(tmp_path, SGD, noisy(0.8, folds=(0, 1, 2)))
    for number, trainer in enumerate(others):
        write_runs(
            tmp_path, trainer, noisy(0.75 if number in (2, 5) else 0.85 + number / 100, folds=(0, 1, 2))
        )
    planned = study(SGD, *others, seeds=SEEDS, folds=(0, 1, 2))
    parts = read_results(planned, tmp_path).by_condition()
    family = judge_scopes(compare_with([choose_compared(each) for each in parts], SGD))
    said = [line for line in answers(parts, family, family) if "instead of" in line]
    assert [" worse" in line for line in said] == [True, True, False, False, False, False]


def test_constant_differences_have_no_verdict(tmp_path):
    for trainer, dice in ((SGD, 0.7), (CPR, 0.71)):
        cases = dice + np.linspace(0, 0.1, 6)
        write_runs(tmp_path, trainer, {seed: {0: cases, 1: cases} for seed in SEEDS})
    found = compared(tmp_path)[CPR]
    assert found.verdict == "no verdict" and "all runs differ by exactly the same" in sentence(found)


def test_bootstrap_withholds_a_verdict_of_equal_trainings(tmp_path):
    """Only the cases vary, which the t-tests cannot see."""
    difference = np.random.default_rng(3).normal(0.01, 0.05, 10)
    hard = np.linspace(0.6, 0.8, 10)
    write_runs(tmp_path, SGD, {s: {f: hard for f in (0, 1)} for s in SEEDS})
    better = {s: {f: hard + difference + 0.0001 * s * f for f in (0, 1)} for s in SEEDS}
    write_runs(tmp_path, CPR, better)
    found = compared(tmp_path)[CPR]
    assert found.p_holm.difference < 0.05 and found.verdict == "undecided"
    assert "the bootstrap over cases and seeds does not confirm it" in sentence(found)


def test_non_inferiority_depends_on_the_margin_and_the_named_trainer(tmp_path):
    for trainer, mean in ((SGD, 0.8), (CPR, 0.7995), (ADAM, 0.77)):
        runs = noisy(mean, folds=(0, 1, 2), training=0.0002, residual=0.0005)
        write_runs(tmp_path, trainer, runs)
    settings = {"folds": (0, 1, 2)}
    wide = compared(tmp_path, SGD, CPR, ADAM, margin=1.0, **settings)
    assert wide[CPR].is_non_inferior and not wide[ADAM].is_non_inferior
    assert not compared(tmp_path, SGD, CPR, ADAM, margin=0.01, **settings)[CPR].is_non_inferior
    named = compared(tmp_path, SGD, CPR, ADAM, reference=ADAM, **settings)
    table = non_inferiority_table(list(named.values()))
    assert table["non_inferior_to"].tolist() == [ADAM, ADAM]
    assert table["non_inferior"].tolist() == ["shown", "shown"]
    assert (table["p_holm"] >= table["p"]).all() and (table["advantage_low"] < table["difference"]).all()


def test_bounds_that_were_never_set_have_no_verdict(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8))
    write_runs(tmp_path, CPR, noisy(0.82))
    for run in study(SGD, CPR, seeds=SEEDS).runs():
        if run.entry == CPR:
            write_history(run.folder(tmp_path), kappa=math.inf if run.fold else 0.1)
    found = compared(tmp_path)[CPR]
    assert found.verdict == "no verdict" and f"as bounds of {CPR} were never set" in sentence(found)
    (part,) = read_results(study(SGD, CPR, seeds=SEEDS), tmp_path).by_condition()
    unset = [line for line in find_warnings(part) if "the bounds of CPR were never set" in line]
    assert len(unset) == sum(flaw.run.fold > 0 for flaw in part.flaws) > 0


def test_runs_with_other_plans_of_the_same_name_have_no_verdict(tmp_path):
    """As after a change of the plans' file, and a study with one more seed."""
    write_runs(tmp_path, SGD, noisy(0.8))
    write_runs(tmp_path, CPR, noisy(0.82))
    for run in study(SGD, CPR, seeds=SEEDS).runs():
        if (run.entry, run.seed) == (SGD, 1):
            continue  # results of others may lack the file
        patch = [16] if run.entry == CPR and run.seed == 3 else [32]
        low = {"patch_size": patch, "batch_size": 2, f"of version {run.seed}": 1}
        plans = {"configurations": {run.configuration: {"inherits_from": "low"}, "low": low}}
        (run.folder(tmp_path).parent / "plans.json").write_text(json.dumps(plans))
    found = compared(tmp_path)[CPR]
    assert found.verdict == "no verdict" and f"as {CPR} has runs with other plans" in sentence(found)
    (part,) = read_results(study(SGD, CPR, seeds=SEEDS), tmp_path).by_condition()
    warnings = [line for line in find_warnings(part) if "differ from those of other runs" in line]
    assert len(warnings) == 2 and all(line.endswith("in patch_size.") for line in warnings)
    assert warnings[0].startswith(f"{CPR}, fold 0, seed 3: its nnUNetPlans")


def test_fine_tuned_run_in_the_place_of_one_from_scratch_has_no_verdict(tmp_path):
    """nnU-Net's option without the suffix ``_pre<Word>`` overwrites the folder."""
    write_runs(tmp_path, SGD, noisy(0.8))
    write_runs(tmp_path, CPR, noisy(0.82))
    fold = next(study(SGD, CPR, seeds=SEEDS).runs()).folder(tmp_path)
    record = {"path": "/b.pth", "sha256": "0" * 64}
    torch.save({"init_args": {PRETRAINED: record}}, fold / "checkpoint_final.pth")
    found = compared(tmp_path)[CPR]
    assert found.verdict == "no verdict" and f"{SGD} has runs that began with other" in sentence(found)
    (part,) = read_results(study(SGD, CPR, seeds=SEEDS), tmp_path).by_condition()
    (warning,) = [line for line in find_warnings(part) if "random weights" in line]
    assert warning.startswith(f"{SGD}, fold 0, seed 1: expected") and "got one from /b.pth" in warning


def test_trainer_that_has_learned_nothing_has_no_verdict(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8))
    write_runs(tmp_path, CPR, {seed: {fold: np.zeros(12) for fold in (0, 1)} for seed in SEEDS})
    found = compared(tmp_path)[CPR]
    assert found.verdict == "no verdict" and not found.is_non_inferior
    assert f"the Dice of {CPR} is 0.00 % in all cases." in sentence(found)


def test_data_set_on_which_a_trainer_collapses_counts_over_data_sets(tmp_path):
    """Half a point better on four data sets and a Dice of 0 on the fifth is not better over five."""
    names, folds = [f"Dataset00{i}_A" for i in range(5)], (0, 1)
    for key, name in enumerate(names):
        write_runs(tmp_path, SGD, noisy(0.8, (None,), key=key), dataset=name)
        better = noisy(0.805, (None,), key=key)
        if key == 4:
            better = {None: {fold: np.zeros(12) for fold in folds}}
        write_runs(tmp_path, CPR, better, dataset=name)

    def over(planned):
        chosen = [choose_compared(each) for each in read_results(planned, tmp_path).by_condition()]
        found, *_ = judge_scopes(compare_with(chosen, SGD))
        return found

    found = over(study(SGD, CPR, datasets=names))
    assert len(found.datasets) == 5 and found.gain < -10
    assert found.verdict == "undecided" and "5 data sets" in found.title
    found = over(study(SGD, CPR, datasets=[*names, "Dataset006_A"]))
    assert found.verdict == "no verdict" and found.title == "5 of 6 data sets"
    assert "left out (Dataset006_A: no finished runs)" in sentence(found)


@pytest.mark.parametrize("place", ["record", "nnU-Net", "others"])
def test_run_without_all_cases_of_its_fold_is_named_and_has_no_verdict(tmp_path, place):
    values = noisy(0.8)
    write_runs(tmp_path, SGD, values)
    shorter = noisy(0.82)
    shorter[2][1] = shorter[2][1][:7]
    write_runs(tmp_path, CPR, shorter)
    expected = [{"train": [], "val": [f"case_{fold}_{i:02}" for i in range(12)]} for fold in (0, 1)]
    record = splits = None
    planned = study(SGD, CPR, seeds=SEEDS)
    if place == "record":
        write_json(record := tmp_path / "splits.json", {planned.datasets[0]: expected})
    if place == "nnU-Net":
        splits = tmp_path / "preprocessed"
        write_json(splits / planned.datasets[0] / "splits_final.json", expected)
    if place != "others":  # then it is the file that says so, as all runs lack the cases
        values[2][1] = values[2][1][:7]
        write_runs(tmp_path, SGD, values)
        write_runs(tmp_path, SGD, {1: {1: values[1][1][:7]}, 3: {1: values[3][1][:7]}})
        write_runs(tmp_path, CPR, {1: {1: values[1][1][:7]}, 3: {1: values[3][1][:7]}})
    (part,) = read_results(planned, tmp_path, record, splits).by_condition()
    warned = [line for line in find_warnings(part) if "validated on" in line]
    assert f"{CPR}, fold 1, seed 2: validated on 7 of the 12 cases of its fold." in warned
    assert len(warned) == (1 if place == "others" else 6)
    table = shown_main_table([part]).cells.astype(str)
    assert "without all cases)" in table.loc[CPR].iloc[0]
    assert ("without all cases)" in table.loc[SGD].iloc[0]) == (place != "others")
    (found,) = judge(compare_with([choose_compared(part)], SGD))
    assert found.verdict == "no verdict" and "not validated on all cases of their fold" in sentence(
        found
    )


def test_results_older_than_an_unfinished_training_do_not_count(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8))
    fold = next(study(SGD, seeds=SEEDS).runs()).folder(tmp_path)
    torch.save({}, fold / "checkpoint_latest.pth")
    os.utime(fold / "validation" / "summary.json", (1e9, 1e9))
    found = read_results(study(SGD, seeds=SEEDS), tmp_path)
    assert len(found.by_condition()[0].finished_runs(SGD)) == 5
    assert found.notes[:-1] == [
        f"Dataset001_Toy, 3d_fullres, nnUNetPlans, {SGD}_seed1, fold 0: validation/summary.json older "
        "than a checkpoint; counts as unfinished"
    ]


def test_classes_that_one_trainer_never_finds_are_warned_of_and_leave_the_verdict(tmp_path):
    """One of three failed classes, and a class that is in no truth, hide no difference."""
    for trainer, lost in ((SGD, 0.0), (CPR, 0.7)):
        for seed, folds in noisy(0.7 + 0.02 * (trainer == CPR), folds=(0, 1, 2)).items():
            for fold, dice in folds.items():
                noise = np.random.default_rng([seed, fold]).normal(0, 0.01, len(dice))
                cases = {
                    f"c{fold}{i:02}": {"1": d, "2": lost + (lost > 0) * noise[i], "3": 0.0}
                    for i, d in enumerate(dice)
                }
                write_fold(tmp_path, f"{trainer}_seed{seed}", fold, cases)
    found = compared(tmp_path, folds=(0, 1, 2))[CPR]
    assert found.verdict == "better" and found.gain == pytest.approx(24, abs=1)
    (part,) = read_results(study(SGD, CPR, seeds=SEEDS, folds=(0, 1, 2)), tmp_path).by_condition()
    assert sum("Dice of 0 in all cases of class" in line for line in find_warnings(part)) == 3


# Simulated studies with known truth; docs/concepts/study-statistics.md has 1,000 of each kind.


def test_few_simulated_studies_without_difference_claim_one():
    counts = verdicts(simulate(SCENARIOS[3], folds=3, seeds=3, effect=0, studies=12))
    assert counts["reports"] == 12 and counts["difference"] <= 2  # of more a probability of 2 %


def test_simulated_difference_is_found():
    counts = verdicts(simulate(SCENARIOS[2], folds=5, seeds=3, effect=2.0, studies=10))
    assert counts["difference"] >= 8


def test_simulated_claims_of_many_methods_are_few():
    results = simulate(SCENARIOS[3], folds=3, seeds=3, effect=0, studies=12, trainers=6)
    assert verdicts(results)["difference"] <= 2


@pytest.mark.parametrize(
    "seeds", [pytest.param(3, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.release)]
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.title)
def test_simulated_false_claims_are_at_most_five_percent(scenario, seeds):
    counts = verdicts(simulate(scenario, folds=3, seeds=seeds, effect=0, studies=200))
    assert counts["difference"] <= 13  # 6.5 %


@pytest.mark.slow
@pytest.mark.parametrize("folds", [1, 2, 3])
def test_simulated_non_inferiority_is_falsely_shown_in_few_studies(folds):
    worse = simulate(SCENARIOS[5], folds=folds, seeds=5, effect=-0.1, studies=200)
    assert shown(worse) <= (17 if folds > 1 else 0)  # 8.5 %


@pytest.mark.release
def test_each_test_of_a_claim_is_needed():
    """Without one of the three tests some kind of study has more false claims."""
    cases, folds = SCENARIOS[1], SCENARIOS[5]
    of_cases = claims_by_parts(simulate(cases, folds=3, seeds=5, effect=0, studies=200))
    of_folds = claims_by_parts(simulate(folds, folds=3, seeds=5, effect=0, studies=200))
    assert list(PARTS) == ["t-test", "folds and seeds", "both", "both and bootstrap"]
    assert of_folds["t-test"] > of_folds["both"] and of_cases["both"] > of_cases["both and bootstrap"]
    seeds = claims_by_parts(simulate(SCENARIOS[4], folds=5, seeds=5, effect=0, studies=200))
    assert seeds["folds and seeds"] > seeds["both"]


def test_signed_rank_test_over_cases_claims_too_much():
    """A test on the cases of one training a fold, as papers have it."""
    claims = []
    for results in simulate(SCENARIOS[0], folds=3, seeds=1, effect=0, studies=60):
        dice = results.cases.pivot(index=["fold", "case"], columns="trainer", values="dice")
        first, second = dice.columns
        claims.append(wilcoxon(dice[second] - dice[first]).pvalue < 0.05)
    assert 0.2 < np.mean(claims) < 0.5
