"""Comparisons of trainers, from the cases of their runs to verdicts."""

import io
import math

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy.stats import wilcoxon

from benchmarks.study_statistics import SCENARIOS, shown, simulate, verdicts
from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.comparisons import class_differences, comparison_table
from nnunet_cpr.reports.non_inferiority import non_inferiorities
from nnunet_cpr.reports.results import Setting, read_results
from nnunet_cpr.reports.verdicts import compare_all
from nnunet_cpr.studies.definition import TrainerEntry
from tests.helpers.report_folds import DATASET, LABELS, NAN, both, study, write_fold

SGD, CPR = "nnUNetTrainerSGD", "nnUNetTrainerCPR"
SETTING = Setting(DATASET, "3d_fullres", "nnUNetPlans")


def write_runs(results, trainer, values, **changes):
    """Write a run for each seed and fold; ``values`` is {seed: {fold: [Dice of each case]}}."""
    for seed, folds in values.items():
        name = trainer if seed is None else f"{trainer}_seed{seed}"
        for fold, dice in folds.items():
            cases = {f"case_{fold}_{i:02}": both(value) for i, value in enumerate(dice)}
            write_fold(results, name, fold, cases, **changes)


def noisy(mean, seeds=(1, 2, 3), folds=(0, 1), cases=12, training=0.002, residual=0.005, key=0):
    """Return Dice values of runs around a mean, with cases of different difficulty."""
    rng = np.random.default_rng([key, round(1e6 * mean)])
    hard = {fold: np.random.default_rng(fold).uniform(-0.2, 0.1, cases) for fold in folds}
    return {
        seed: {
            fold: np.clip(
                mean + hard[fold] + rng.normal(0, training) + rng.normal(0, residual, cases), 0, 1
            )
            for fold in folds
        }
        for seed in seeds
    }


def compared(planned, results):
    return {c.entry.trainer: c for c in compare_all(read_results(planned, results, None, None))}


def test_clear_difference_is_better_or_worse(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8))
    write_runs(tmp_path, CPR, noisy(0.82))
    planned = study(SGD, CPR, seeds=(1, 2, 3))
    found = compared(planned, tmp_path)[CPR]
    assert found.verdict == "better"
    assert found.difference.mean == pytest.approx(2, abs=0.5)
    assert (found.folds, found.seeds, found.difference.cases) == ([0, 1], [1, 2, 3], 24)
    assert found.sentence.startswith(f"{CPR} is better than {SGD}: +")
    turned = compared(study(SGD, CPR, seeds=(1, 2, 3), reference=CPR), tmp_path)[SGD]
    assert turned.verdict == "worse" and turned.difference.mean == -found.difference.mean


def test_equal_trainings_are_equivalent(tmp_path):
    same = noisy(0.8)
    write_runs(tmp_path, SGD, same)
    write_runs(tmp_path, CPR, same)
    found = compared(study(SGD, CPR, seeds=(1, 2, 3)), tmp_path)[CPR]
    assert found.verdict == "equivalent"
    assert "are equivalent within ±0.1 points of Dice, with probability 1.00" in found.sentence


def test_noise_between_trainings_is_undecided(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8, training=0.01, key=1))
    write_runs(tmp_path, CPR, noisy(0.8, training=0.01, key=2))
    found = compared(study(SGD, CPR, seeds=(1, 2, 3)), tmp_path)[CPR]
    assert found.verdict == "undecided"
    assert "not statistically significant" in found.sentence
    assert "no difference" not in found.sentence.lower()
    assert "no number of seeds would narrow the interval to ±0.1 points; ±" in found.sentence


@pytest.mark.parametrize(
    ("margin", "advice"),
    [(1.2, "about 8 seeds would narrow the interval to ±1.2 points"), (1.9, "to ±0.97 points at best")],
)
def test_an_undecided_verdict_says_what_more_seeds_would_bring(tmp_path, margin, advice):
    write_runs(tmp_path, SGD, noisy(0.8, training=0.01, key=1))
    write_runs(tmp_path, CPR, noisy(0.81, training=0.01, key=2))
    found = compared(study(SGD, CPR, seeds=(1, 2, 3), margin=margin), tmp_path)[CPR]
    assert advice in found.sentence


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_fewer_than_three_seeds_describe_trainings_only(tmp_path, seeds):
    write_runs(tmp_path, SGD, noisy(0.8, seeds))
    write_runs(tmp_path, CPR, noisy(0.9, seeds))
    found = compared(study(SGD, CPR, seeds=seeds), tmp_path)[CPR]
    assert found.verdict == "undecided"
    assert found.sentence.startswith(f"These trainings of {CPR} differ from those of {SGD} by +")
    assert "cannot tell whether the methods differ" in found.sentence
    assert " better" not in found.sentence


def two_seeds_of_one_trainer(results):
    """Return a study like the one on CT whose report claimed a difference between two seeds.

    The runs of seed 2 are 0.68 points below those of seed 1 in nearly all of 108 cases.
    """
    rng = np.random.default_rng(0)
    for seed, mean in ((1, 0.9), (2, 0.8932)):
        runs = {fold: mean + rng.normal(0, 0.01, 36) for fold in range(3)}
        write_runs(results, SGD, {seed: runs})
    return study(f"{SGD}_seed1", f"{SGD}_seed2", folds=(0, 1, 2))


def test_two_seeds_of_one_trainer_do_not_differ(tmp_path):
    planned = two_seeds_of_one_trainer(tmp_path)
    (found,) = compared(planned, tmp_path).values()
    assert found.difference.mean == pytest.approx(-0.68, abs=0.25)
    assert found.same_method and found.verdict == "undecided" and math.isnan(found.p_holm)
    assert "are trainings of one method with different seeds" in found.sentence
    console = Console(file=io.StringIO(), width=200)
    files = write_report(planned, tmp_path, None, None, tmp_path / "report", console)
    texts = [path.read_text() for path in files if path.suffix in (".md", ".csv")]
    for text in [*texts, console.file.getvalue()]:
        assert "seed2 is better" not in text and "seed2 is worse" not in text
        assert "statistically significant difference" not in text.replace("not statistically", "")


def test_holm_counts_methods_and_metrics_but_not_seeds(tmp_path):
    # Two data sets and two configurations: four comparisons of methods, four of seeds.
    names = (SGD, CPR, f"{SGD}_seed2")
    for dataset in (DATASET, "Dataset002_Other"):
        for configuration in ("2d", "3d_fullres"):
            for position, trainer in enumerate(names):
                runs = {None: {f: [0.5 + 0.01 * f * position + 0.02 * position] * 4 for f in (0, 1)}}
                write_runs(
                    tmp_path, trainer, runs, dataset=dataset, configuration=configuration, labels=LABELS
                )
    planned = study(*names, datasets=(DATASET, "Dataset002_Other"), configurations=("2d", "3d_fullres"))
    found = compare_all(read_results(planned, tmp_path, None, None))
    methods = [c for c in found if c.entry.trainer == CPR]
    assert len(found) == 8 and len(methods) == 4
    assert [c.p_holm for c in methods] == pytest.approx([min(1, 4 * c.p) for c in methods])
    assert all(math.isnan(c.p_holm) for c in found if c not in methods)


def test_only_complete_folds_and_seeds_are_compared(tmp_path):
    sgd, cpr = noisy(0.8, (1, 2, 3, 4), (0, 1, 2)), noisy(0.8, (1, 2, 3, 4), (0, 1, 2))
    del cpr[4][1], cpr[4][2]
    write_runs(tmp_path, SGD, sgd)
    write_runs(tmp_path, CPR, cpr)
    found = compared(study(SGD, CPR, seeds=(1, 2, 3, 4), folds=(0, 1, 2)), tmp_path)[CPR]
    assert (found.folds, found.seeds, found.left_out) == ([0, 1, 2], [1, 2, 3], 1)
    assert "Compared: 9 of 12 runs of each. Left out: 1 run of incomplete" in found.sentence


def test_unfinished_trainer_cannot_be_compared(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8))
    found = compared(study(SGD, CPR, seeds=(1, 2, 3)), tmp_path)[CPR]
    assert found.difference.cases == 0 and found.verdict == "undecided"
    assert "cannot be compared by Dice" in found.sentence


def test_case_with_one_value_is_left_out(tmp_path):
    some = {f"c{i}": both(0.5 + 0.01 * i) for i in range(7)}
    nothing = {"1": NAN, "2": NAN}
    write_fold(tmp_path, "A", 0, {**some, "x": nothing, "y": nothing, "only_a": both(0.5)})
    write_fold(tmp_path, "B", 0, {**some, "x": nothing, "y": both(0)})
    found = compared(study("A", "B"), tmp_path)["B"]
    assert found.difference.cases == 7 and found.cases_left_out == 2
    assert "Left out: 2 cases with a Dice from one of the two only." in found.sentence


def test_pairs_are_means_over_the_seeds(tmp_path):
    write_runs(tmp_path, SGD, {s: {0: [0.1 * s, 0.5], 1: [0.2, 0.2]} for s in (1, 2, 3)})
    write_runs(tmp_path, CPR, {s: {0: [0.1 * s, 0.6], 1: [0.2, 0.3]} for s in (1, 2, 3)})
    found = compared(study(SGD, CPR, seeds=(1, 2, 3)), tmp_path)[CPR]
    assert found.pairs.loc[(0, "case_0_00")].tolist() == pytest.approx([20, 20])
    assert found.pairs.loc[(0, "case_0_01")].tolist() == pytest.approx([50, 60])
    # Mean over the trainings of the mean over their cases.
    assert found.difference.mean == pytest.approx(5)
    assert (found.wins, found.losses) == (2, 0)


def test_table_has_a_row_for_each_comparison(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8))
    write_runs(tmp_path, CPR, noisy(0.82))
    planned = study(SGD, TrainerEntry(CPR, "CPR, 1k"), seeds=(1, 2, 3))
    table = comparison_table(compared(planned, tmp_path).values())
    (row,) = table.to_dict("records")
    assert (row["metric"], row["unit"], row["verdict"]) == ("dice", "points", "better")
    assert (row["trainings"], row["cases"], row["seeds"]) == (6, 24, "1 2 3")
    assert row["difference"] == pytest.approx(row["trainer_mean"] - row["reference_mean"])
    assert row["p_better"] + row["p_equivalent"] + row["p_worse"] == pytest.approx(1)
    assert row["p_holm"] == row["p"] == max(row["p_corrected_t"], row["p_fold_seed"])
    assert row["interval_low"] < row["bootstrap_low"] < row["difference"]


def test_class_differences_are_those_of_one_class(tmp_path):
    for seed in (1, 2, 3):
        for fold in (0, 1):
            easy = {f"c{fold}{i}": {"1": 0.8, "2": 0.5} for i in range(4)}
            write_fold(tmp_path, f"{SGD}_seed{seed}", fold, easy)
            better = {name: {"1": 0.8, "2": 0.5 + 0.01 * seed} for name in easy}
            write_fold(tmp_path, f"{CPR}_seed{seed}", fold, better)
    results = read_results(study(SGD, CPR, seeds=(1, 2, 3)), tmp_path, None, None)
    table = class_differences(results, compare_all(results)).set_index("class")
    assert table.loc["liver", "difference"] == 0
    assert table.loc["left_kidney", "difference"] == pytest.approx(2)
    assert table.loc["left_kidney", "interval_low"] < 2 < table.loc["left_kidney", "interval_high"]


def test_lower_distance_is_better(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8))
    write_runs(tmp_path, CPR, noisy(0.8))
    results = read_results(study(SGD, CPR, seeds=(1, 2, 3), metrics=("hd95",)), tmp_path, None, None)
    distances = {SGD: 5.0, CPR: 3.0}
    rng = np.random.default_rng(0)
    of_runs = results.cases["trainer"].map(distances) + rng.normal(0, 0.1, len(results.cases))
    results.cases["hd95"] = of_runs
    (found,) = compare_all(results)
    assert found.difference.mean == pytest.approx(-2, abs=0.1)
    assert found.verdict == "better" and found.equivalence.better > 0.95 and found.wins == 24
    assert "-2.0" in found.sentence and "mm of HD95" in found.sentence


def test_false_positives_in_empty_cases_withhold_the_verdict(tmp_path):
    """The better trainer in cases with a structure predicts it in all cases without one."""
    rng = np.random.default_rng(0)
    for seed in (1, 2, 3):
        for fold in (0, 1, 2):
            for trainer, gain, empty in ((SGD, 0, NAN), (CPR, 0.01, 0.0)):
                cases = {f"c{fold}{i}": {"1": 0.8 + gain + rng.normal(0, 0.001)} for i in range(6)}
                cases |= {f"e{fold}{i}": {"1": empty} for i in range(6)}
                write_fold(tmp_path, f"{trainer}_seed{seed}", fold, cases)
    planned = study(SGD, CPR, seeds=(1, 2, 3), folds=(0, 1, 2))
    found = compared(planned, tmp_path)[CPR]
    assert found.verdict == "undecided" and found.cases_left_out == 18
    assert "18 cases with a Dice from one of the two only are left out" in found.sentence
    (judged,) = non_inferiorities(read_results(planned, tmp_path, None, None))
    assert not judged.is_shown


def test_table_with_another_sign_withholds_the_verdict(tmp_path):
    """A rare class is 5 points worse, the others 1 point better: classes count equally in the table."""
    rng = np.random.default_rng(0)
    for seed in (1, 2, 3):
        for fold in (0, 1, 2):
            for trainer, gain in ((SGD, 0.0), (CPR, 0.01)):
                cases = {
                    f"c{fold}{i}": {
                        "1": 0.75 + gain + rng.normal(0, 0.001),
                        "2": 0.7 - 5 * gain if i < 2 else NAN,
                    }
                    for i in range(20)
                }
                write_fold(tmp_path, f"{trainer}_seed{seed}", fold, cases)
    found = compared(study(SGD, CPR, seeds=(1, 2, 3), folds=(0, 1, 2)), tmp_path)[CPR]
    assert found.difference.mean > 0 > found.tabled_difference
    assert found.verdict == "undecided"
    assert "the means of the main table, over classes, differ the other way" in found.sentence


def test_undecided_sentence_names_the_bootstrap_interval(tmp_path):
    """Equal trainings: only the cases vary, which the t-test cannot see."""
    rng = np.random.default_rng(3)
    difference = rng.normal(0.01, 0.05, 10)
    write_runs(tmp_path, SGD, {s: {f: np.full(10, 0.7) for f in (0, 1)} for s in (1, 2, 3)})
    better = {s: {f: 0.7 + difference + 0.0001 * s * f for f in (0, 1)} for s in (1, 2, 3)}
    write_runs(tmp_path, CPR, better)
    found = compared(study(SGD, CPR, seeds=(1, 2, 3)), tmp_path)[CPR]
    assert found.p_holm < 0.05 and found.verdict == "undecided"
    assert "seeds would" not in found.sentence  # they are not what is missing
    assert "the bootstrap interval over cases and seeds" in found.sentence
    assert "not statistically significant" not in found.sentence


def test_one_fold_has_no_verdict(tmp_path):
    write_runs(tmp_path, SGD, noisy(0.8, folds=(0,)))
    write_runs(tmp_path, CPR, noisy(0.84, folds=(0,)))
    planned = study(SGD, CPR, seeds=(1, 2, 3), folds=(0,))
    found = compared(planned, tmp_path)[CPR]
    assert found.p_holm < 0.05 and found.verdict == "undecided"
    assert "one fold does not show how the difference varies between folds" in found.sentence
    (judged,) = non_inferiorities(read_results(planned, tmp_path, None, None))
    assert not judged.is_shown and "one fold" in judged.sentence


def test_a_rare_class_that_is_lost_is_not_equivalent(tmp_path):
    """The means over cases are equal, those over classes differ by 5 points."""
    rng = np.random.default_rng(0)
    for seed in (1, 2, 3):
        for fold in (0, 1, 2):
            for trainer, loss in ((SGD, 0.0), (CPR, 0.1)):
                cases = {
                    f"c{fold}{i}": {
                        "1": 0.75 + (0.05 * loss if i >= 2 else 0) + rng.normal(0, 0.001),
                        "2": 0.7 - loss if i < 2 else NAN,
                    }
                    for i in range(22)
                }
                write_fold(tmp_path, f"{trainer}_seed{seed}", fold, cases)
    planned = study(SGD, CPR, seeds=(1, 2, 3), folds=(0, 1, 2), margin=0.5)
    found = compared(planned, tmp_path)[CPR]
    assert found.equivalence.equivalent > 0.95 and found.tabled_difference < -4
    assert found.verdict == "undecided"
    assert "the means of the main table, over classes, differ" in found.sentence
    (judged,) = non_inferiorities(read_results(planned, tmp_path, None, None))
    assert judged.p_holm < 0.05 and not judged.is_shown
    assert "the means of the main table, over classes, differ" in judged.sentence


def test_false_positives_leave_a_class_without_difference(tmp_path):
    for seed in (1, 2, 3):
        for fold in (0, 1):
            for trainer, gain, empty in ((SGD, 0, NAN), (CPR, 0.01, 0.0)):
                cases = {
                    f"c{fold}{i}": {"1": 0.8, "2": 0.7 + gain if i < 3 else empty} for i in range(6)
                }
                write_fold(tmp_path, f"{trainer}_seed{seed}", fold, cases)
    results = read_results(study(SGD, CPR, seeds=(1, 2, 3)), tmp_path, None, None)
    table = class_differences(results, compare_all(results)).set_index("class")
    assert table["cases_left_out"].to_dict() == {"liver": 0, "left_kidney": 6}
    assert table.loc["liver", "difference"] == 0
    assert table.loc["left_kidney", ["difference", "interval_low", "interval_high"]].isna().all()


def test_run_without_values_is_left_out(tmp_path):
    for seed in (1, 2, 3):
        for fold in (0, 1, 2):
            for trainer in (SGD, CPR):
                empty = (trainer, fold, seed) == (CPR, 0, 1)
                cases = {f"c{fold}{i}": {"1": NAN if empty else 0.5 + 0.1 * i} for i in range(3)}
                write_fold(tmp_path, f"{trainer}_seed{seed}", fold, cases)
    found = compared(study(SGD, CPR, seeds=(1, 2, 3), folds=(0, 1, 2)), tmp_path)[CPR]
    assert (found.folds, found.seeds) == ([1, 2], [1, 2, 3])
    assert "Compared: 6 of 9 runs of each." in found.sentence


def test_largest_set_of_many_seeds_is_compared(tmp_path):
    seeds = tuple(range(10))
    for trainer in (SGD, CPR):
        for seed in seeds:
            for fold in (0, 1) if seed % 2 else (2, 3):
                write_fold(tmp_path, f"{trainer}_seed{seed}", fold, {f"c{fold}": both(0.5)})
    found = compared(study(SGD, CPR, seeds=seeds, folds=(0, 1, 2, 3)), tmp_path)[CPR]
    assert (len(found.folds), len(found.seeds), found.left_out) == (2, 5, 10)


# Simulated studies with known truth; docs/concepts/study-statistics.md has 1,000 of each kind.


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_few_simulated_studies_without_difference_claim_one(seeds):
    studies = 12
    counts = verdicts(simulate(SCENARIOS[3], folds=3, seeds=seeds, effect=0, studies=studies))
    assert counts["reports"] == studies
    # With a rate of 5 %, three or more of 12 have a probability of 2 %.
    assert counts["difference"] <= (2 if seeds > 1 else 0)


def test_signed_rank_test_over_cases_claims_too_much():
    """The test of earlier versions, on one training a fold."""
    claims = []
    for results in simulate(SCENARIOS[0], folds=3, seeds=1, effect=0, studies=60):
        dice = results.cases.pivot(index=["fold", "case"], columns="trainer", values="dice")
        first, second = dice.columns
        claims.append(wilcoxon(dice[second] - dice[first]).pvalue < 0.05)
    assert 0.2 < np.mean(claims) < 0.5


def test_simulated_difference_is_found():
    counts = verdicts(simulate(SCENARIOS[2], folds=5, seeds=3, effect=2.0, studies=10))
    assert counts["difference"] >= 8


def test_simulated_claims_of_many_methods_are_few():
    results = simulate(SCENARIOS[3], folds=3, seeds=3, effect=0, studies=12, trainers=6)
    assert verdicts(results)["difference"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.title)
def test_simulated_false_claims_are_at_most_five_percent(scenario, seeds):
    counts = verdicts(simulate(scenario, folds=3, seeds=seeds, effect=0, studies=200))
    assert counts["difference"] <= 13  # 6.5 %


@pytest.mark.slow
@pytest.mark.parametrize("folds", [1, 2, 3])
def test_simulated_non_inferiority_is_falsely_shown_in_few_studies(folds):
    worse = simulate(SCENARIOS[5], folds=folds, seeds=5, effect=-0.1, studies=200)
    assert shown(worse) <= (17 if folds > 1 else 0)  # 8.5 %


def test_simulated_study_has_its_true_components():
    (results,) = simulate(SCENARIOS[0], folds=2, seeds=3, effect=1.0, studies=1)
    cases = results.cases
    assert len(cases) == 2 * 2 * 3 * 36 and cases["dice"].notna().all()
    means = cases.groupby("trainer")["dice"].mean() * 100
    assert means[means.index != SGD].iloc[0] - means[SGD] == pytest.approx(1.0, abs=1)
    assert isinstance(cases, pd.DataFrame)
