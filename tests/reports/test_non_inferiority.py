"""Non-inferiority to a named trainer."""

from nnunet_cpr.reports.non_inferiority import in_words, non_inferiorities, non_inferiority_table
from nnunet_cpr.reports.results import read_results
from tests.helpers.report_folds import both, study, write_fold

SGD, CPR, ADAM = "nnUNetTrainerSGD", "nnUNetTrainerCPR", "nnUNetTrainerAdamW"


def write(results, values):
    """Write runs of 3 seeds and 3 folds; ``values`` is {trainer: mean Dice}."""
    for trainer, mean in values.items():
        for seed in (1, 2, 3):
            for fold in range(3):
                noise = 0.0002 * ((seed * 7 + fold * 3 + len(trainer)) % 5 - 2)
                cases = {f"c{fold}{i}": both(mean + noise + 0.01 * i) for i in range(6)}
                write_fold(results, f"{trainer}_seed{seed}", fold, cases)


def found(results, **changes):
    planned = study(SGD, CPR, ADAM, **{"folds": (0, 1, 2), "seeds": (1, 2, 3), **changes})
    return {
        each.comparison.entry.trainer: each
        for each in non_inferiorities(read_results(planned, results, None, None))
    }


def test_small_disadvantage_is_non_inferior_at_a_wide_margin(tmp_path):
    write(tmp_path, {SGD: 0.8, CPR: 0.7995, ADAM: 0.77})
    wide = found(tmp_path, margin=1.0)
    assert wide[CPR].is_shown and not wide[ADAM].is_shown
    assert "is non-inferior to nnUNetTrainerSGD by Dice at a margin of 1 point" in wide[CPR].sentence
    assert "is not shown to be non-inferior" in wide[ADAM].sentence
    assert not found(tmp_path, margin=0.04)[CPR].is_shown


def test_named_trainer_need_not_be_the_reference(tmp_path):
    write(tmp_path, {SGD: 0.8, CPR: 0.8, ADAM: 0.78})
    results = found(tmp_path, non_inferior_to=ADAM)
    assert set(results) == {SGD, CPR} and all(each.is_shown for each in results.values())
    table = non_inferiority_table(list(results.values()))
    assert table["non_inferior_to"].tolist() == [ADAM, ADAM]
    assert table["non_inferior"].tolist() == ["shown", "shown"]
    assert (table["p_holm"] >= table["p"]).all() and (table["advantage_low"] < table["difference"]).all()


def test_one_seed_shows_nothing(tmp_path):
    write(tmp_path, {SGD: 0.8, CPR: 0.85, ADAM: 0.8})
    results = found(tmp_path, seeds=(1,))
    assert not any(each.is_shown for each in results.values())
    assert "expected at least 3 seeds, got 1" in results[CPR].sentence


def test_trainers_with_too_few_seeds_share_a_sentence(tmp_path):
    write(tmp_path, {SGD: 0.8, CPR: 0.85, ADAM: 0.8})
    results = list(found(tmp_path, seeds=(1, 2)).values())
    (line,) = in_words(results, results[0].comparison.setting)
    expected = f"Non-inferiority to {SGD} was not tested for 2 trainers: expected at least 3 seeds."
    assert line == expected
    one = in_words(results[:1], results[0].comparison.setting)
    assert one == [results[0].sentence]
    assert in_words(results, results[0].comparison.setting._replace(dataset="Other")) == []


def test_seeds_of_one_method_are_not_tested(tmp_path):
    write(tmp_path, {SGD: 0.8})
    planned = study(*(f"{SGD}_seed{seed}" for seed in (1, 2)), folds=(0, 1, 2))
    assert non_inferiorities(read_results(planned, tmp_path, None, None)) == []
