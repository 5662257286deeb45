"""Answer of a report in words: warnings, comparisons, and what was shown to be not worse."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from nnunet_cpr.refusals import counted
from nnunet_cpr.reports.comparison import Comparison, Verdict
from nnunet_cpr.reports.metrics import METRICS, p_text
from nnunet_cpr.reports.results import ASSUMED, FAILED, MIN_FOLDS, ConditionResults, class_means
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.reports.statistics import LEVEL
from nnunet_cpr.studies.state import planned_epochs


def find_warnings(results: ConditionResults) -> list[str]:
    """Return one line for each class with Dice 0 in all cases, missing, short and diverged training."""
    titles = {entry.key: entry.full_title for entry in results.study.trainers}
    counts = {trainer: len(results.finished_runs(trainer)) for trainer in titles}
    return [
        *_classes_of_zero(results, titles),
        *(f"{titles[run.entry]}, {run.fold_and_seed}: {text}." for run, text, _ in results.flaws),
        *(
            f"{titles[trainer]}: {count} of {results.planned_runs} runs finished."
            for trainer, count in counts.items()
            if count < results.planned_runs
        ),
        *_equal_seeds(results, titles),
        *_short_trainings(results, titles),
        *_diverged_trainings(results, titles),
    ]


def _classes_of_zero(results: ConditionResults, titles: dict[str, str]) -> Iterator[str]:
    means = class_means(results.cases).dropna(subset=["dice"])
    for (trainer, name), rows in means.groupby(["trainer", "class"], sort=False):
        zero = rows.loc[rows["dice"] == 0, ["fold", "trainer", "seed"]].to_numpy()
        if len(zero):
            runs = "; ".join(results.run(*run).fold_and_seed for run in zero)
            where = "all runs" if len(zero) == len(rows) else runs
            yield f"{titles[trainer]}: Dice of 0 in all cases of class {name} ({where})."


def _equal_seeds(results: ConditionResults, titles: dict[str, str]) -> Iterator[str]:
    """Yield a line for each two seeds with the same results, as of a copied folder."""
    values = results.cases.pivot(
        index=["fold", "case", "class"], columns=["trainer", "seed"], values="dice"
    )
    for (trainer, fold), runs in _runs_by_fold(results).items():
        of_fold = values.xs(fold, level="fold")[trainer]
        for one, other in combinations(runs, 2):
            if of_fold[one].notna().sum() > 1 and of_fold[one].equals(of_fold[other]):
                yield (
                    f"{titles[trainer]}, fold {fold}: seeds {one} and {other} have the same Dice in all "
                    "cases, as if one was copied."
                )


def _runs_by_fold(results: ConditionResults) -> dict[tuple[str, int], list[int]]:
    runs: dict[tuple[str, int], list[int]] = {}
    for entry in results.study.trainers:
        for fold, seed in results.finished_runs(entry.key):
            runs.setdefault((entry.key, fold), []).append(seed)
    return runs


def _short_trainings(results: ConditionResults, titles: dict[str, str]) -> Iterator[str]:
    """Yield a line for the finished runs that were ended after the same epoch, before their last one."""
    epochs = results.epochs.dropna(subset=["seconds"])
    trained = epochs.groupby(["trainer", "fold", "seed"])["epoch"].max() + 1
    for trainer, title in titles.items():
        finished, short = results.finished_runs(trainer), defaultdict(list)
        for fold, seed in finished:
            run = results.run(fold, trainer, seed)
            planned = planned_epochs(run, results.folder) or 0
            count = trained.get((trainer, fold, seed), planned)  # other machines' logs may be missing
            if count < planned:
                short[f"{count} of {planned}"].append(run.fold_and_seed)
        for epochs_trained, runs in short.items():
            where = f"all {len(runs)} runs" if 1 < len(runs) == len(finished) else "; ".join(runs)
            yield f"{title}, {where}: {epochs_trained} epochs were trained."


def _diverged_trainings(results: ConditionResults, titles: dict[str, str]) -> Iterator[str]:
    """Yield a line for each training whose loss is not finite or ends above its start."""
    epochs = results.epochs.dropna(subset=["seconds"])  # one may be running
    for (trainer, fold, seed), rows in epochs.groupby(["trainer", "fold", "seed"], sort=False):
        losses = rows.sort_values("epoch")["train_loss"].astype(float)
        end = losses.iloc[-max(1, len(losses) // 10) :].mean()
        if math.isnan(losses.iloc[-1]):
            reason = "its loss is not a number"
        elif len(losses) >= 5 and end > losses.iloc[0]:
            reason = "its loss ends above that of its first epoch"
        else:
            continue
        run = results.run(fold, trainer, seed)
        yield f"{titles[trainer]}, {run.fold_and_seed}: the training diverged ({reason})."


MAX_SENTENCES = 6
"""Maximum number of comparisons in words; the table and the CSV file have all."""


def answers(
    conditions: Sequence[ConditionResults],
    comparisons: Sequence[Comparison],
    tested: Sequence[Comparison],
) -> list[str]:
    """Return the result in words: warnings, a sentence for each comparison, and non-inferiority.

    Args:
        conditions: results of each condition of the study.
        comparisons: those with the reference, over data sets and in each condition.
        tested: those with the trainer to which others may be non-inferior.
    """
    prefixes = {each.condition: f"{each.title}: " if len(conditions) > 1 else "" for each in conditions}
    lines = [f"Warning: {prefixes[s.condition]}{line}" for s in conditions for line in find_warnings(s)]
    lines += [over_sentence(each) for each in comparisons if each.datasets]
    chosen = _most_interesting(comparisons)
    lines += [f"{prefixes[each.condition]}{sentence(each)}" for each in chosen]
    is_over = any(each.datasets for each in comparisons)
    if number := sum(not each.datasets for each in comparisons) - len(chosen):
        more = "" if is_over else "more "
        lines.append(f"{number} {more}comparisons are in the tables of differences.")
    for metric in conditions[0].metrics:
        of_metric = [
            (f"over {each.title}: " if each.datasets else prefixes[each.condition], each)
            for each in tested
            if each.metric == metric
        ]
        lines += [_not_worse(of_metric)] if of_metric else []
    return lines


def _most_interesting(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons in words: of many those with a verdict, worse ones first."""
    has_no_verdict = (Verdict.UNDECIDED, Verdict.NONE)
    is_over = any(each.datasets for each in comparisons)
    chosen = [
        each
        for each in comparisons
        if not each.datasets and not (is_over and each.verdict in has_no_verdict)
    ]
    if len(chosen) > MAX_SENTENCES:
        order = {Verdict.WORSE: 0, Verdict.BETTER: 1, Verdict.UNDECIDED: 3, Verdict.NONE: 4}
        chosen.sort(key=lambda each: (order.get(each.verdict, 2), -abs(each.gain)))
    return chosen[:MAX_SENTENCES]


def over_sentence(n: Comparison) -> str:
    """Return the result over data sets in words."""
    low, high = (f"{_amount(n, gain)}" for gain in n.without_one)
    side = "Higher" if n.metric.sign > 0 else "Lower"
    described = (
        f"{side} on {n.higher_on} of {len(n.datasets)} (sign test: p = {p_text(n.p_sign)}); without one "
        f"of them {low} to {high}."
    )
    return f"Over {n.title}: {sentence(n)} {described}"


def _not_worse(titled: Sequence[tuple[str, Comparison]]) -> str:
    """Return which trainers are shown to be non-inferior by one metric.

    With none it is said which margin these runs could have shown.
    """
    n = titled[0][1]
    shown = "; ".join(f"{t}{e.entry.full_title}" for t, e in titled if e.is_non_inferior)
    smallest = min((e.smallest_margin for _, e in titled if not e.obstacle), default=0.0)
    if not shown:
        shown = "no trainer"
        if smallest > n.margin:
            amount = n.metric.amount(smallest)
            shown += f" (equal ones could have been shown within {amount} at best)"
    margin = f"{n.metric.amount(n.margin, 'g')} of {n.metric.title}"
    return f"Shown to be not worse than {n.reference.full_title} by more than {margin}: {shown}."


def ratio_notes(conditions: Sequence[Compared]) -> list[str]:
    """Return a note for the data sets whose splits the study has not recorded."""
    sources = {each.results.condition.dataset: each.results.ratio.source for each in conditions}
    assumed = [dataset for dataset, source in sources.items() if source == ASSUMED]
    if not assumed or len(conditions[0].results.study.trainers) == 1:
        return []
    which = "all data sets" if len(assumed) == len(sources) else ", ".join(assumed)
    return [
        f"The study has not recorded the splits of {which}; four times as many cases for training as "
        "for the test of a fold are assumed, as in five folds."
    ]


def fold_notes(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a note if intervals are wide because there are two folds."""
    if all(len(each.folds) != MIN_FOLDS or each.obstacle for each in comparisons):
        return []
    return [
        "Two folds leave one degree of freedom for the variation between folds, so intervals are wide; "
        "a third fold narrows them most."
    ]


def sentence(n: Comparison) -> str:
    """Return the result of a comparison in words, with its interval and the reason of its verdict."""
    names = f"{n.entry.full_title} instead of {n.reference.full_title}"
    metric = "" if n.metric.name == "dice" else f" by {n.metric.title}"
    if math.isnan(n.gain):
        return f"{names}{metric}: no run with values that both have finished."
    shown = f"{_amount(n, n.gain)}{metric}"
    if not math.isnan(n.interval[0]):
        shown += f", 95 % interval {_interval(*n.interval)}"
    reason = _reason(n)
    other_mean = "" if "means of the main table" in reason else _other_mean(n)
    return f"{names}: {shown}{reason}{other_mean}.{_failures(n)}"


def _reason(n: Comparison) -> str:
    if n.verdict is Verdict.NONE:
        return f"; {n.obstacle}"
    if n.without_marked is not None and n.verdict_with_marked is not n.verdict:
        return (
            f"; undecided, as it would be {n.verdict_with_marked.value} with and "
            f"{n.without_marked.verdict_with_marked.value} without the "
            f"{counted(n.cases_marked, 'case')} in which only one of the two marks an absent structure"
        )
    marked = counted(n.cases_marked, "case")
    same = f"; the same without {marked} of absent structures" if n.cases_marked else ""
    if n.verdict in (Verdict.BETTER, Verdict.WORSE):
        return f" ({_p(n)}){same}"
    margin = n.metric.amount(n.margin, "g")
    if n.verdict is Verdict.EQUIVALENT:
        return f"; equivalent within {margin}{same}"
    if n.verdict is Verdict.NON_INFERIOR:
        return f"; not worse by {margin} or more; {_no_difference_shown(n)}{same}"
    return f"{_withheld(n, margin)}; {_no_difference_shown(n)}{same}"


def _withheld(n: Comparison, margin: str) -> str:
    """Return what the interval shows of the margin, and Holm's correction withholds."""
    if n.is_within and n.p_holm.equivalence > LEVEL / 2:
        return f"; within {margin}, but not after Holm's correction"
    is_above = n.interval[0] > -n.margin
    if is_above and n.p_holm.non_inferiority > LEVEL / 2:
        return f"; not worse by {margin} or more, but not after Holm's correction"
    return ""


def _no_difference_shown(n: Comparison) -> str:
    """Return why the numbers do not show a difference."""
    if n.excludes_zero and n.p_holm.difference > LEVEL:
        return f"not statistically significant after the correction ({_p(n)})"
    if n.p_holm.difference > LEVEL:
        return f"not statistically significant ({_p(n)})"
    if n.excludes_zero:
        return f"undecided, as the means of the main table, over classes, are {_amount(n, n.table_gain)}"
    return "undecided, as the bootstrap over cases and seeds does not confirm it"


def _other_mean(n: Comparison) -> str:
    """Return the difference of the main table's means where it is another one, and why."""
    if math.isnan(n.table_gain) or abs(n.table_gain - n.gain) < 0.005:
        return ""
    return (
        f"; by the means of the main table, over cases for each class and then over classes, "
        f"{_amount(n, n.table_gain)}"
    )


def _failures(n: Comparison) -> str:
    """Return what rare failures could change where two trainers are called alike."""
    failures = n.failures
    if n.verdict not in (Verdict.EQUIVALENT, Verdict.NON_INFERIOR) or not failures.cases:
        return ""
    dice, bound = METRICS["dice"], failures.bound
    return (
        f" Cases with a Dice below {100 * FAILED:g} %: {failures.entry} against {failures.reference} "
        f"of {failures.cases}; so many cannot exclude that up to {100 * bound:.1f} % fail, which would "
        f"cost {dice.amount(bound * failures.dice)}."
    )


def _p(n: Comparison) -> str:
    p, corrected = p_text(n.p.difference), p_text(n.p_holm.difference)
    text = f"p {'' if p.startswith('<') else '= '}{p}"
    if n.compared > 1:
        text += f", {corrected} after Holm's correction for {n.compared} comparisons"
    return text


def _amount(n: Comparison, gain: float) -> str:
    way = "" if round(gain, 2) == 0 else " better" if gain > 0 else " worse"
    return f"{n.metric.amount(gain)}{way}"


def _interval(low: float, high: float) -> str:
    low, high = round(low, 2), round(high, 2)
    if low < 0 < high:
        return f"{-low:.2f} worse to {high:.2f} better"
    return "{:.2f} to {:.2f}".format(*sorted([abs(low), abs(high)]))
