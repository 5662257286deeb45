"""Comparisons in words."""

from __future__ import annotations

import math
from typing import Any

from nnunet_cpr.reports.metrics import p_text
from nnunet_cpr.reports.numbers import Gain
from nnunet_cpr.reports.verdicts import Judged, Verdict


def sentence(judged: Judged[Any]) -> str:
    """Return the result of a comparison in words, with its interval and the reason of its verdict."""
    n = judged.numbers
    names = f"{n.entry.full_title} instead of {n.reference.full_title}"
    metric = "" if n.metric.name == "dice" else f" by {n.metric.title}"
    if math.isnan(n.gain):
        return f"{names}{metric}: no run with values that both have finished."
    shown = f"{_amount(n, n.gain)}{metric}"
    if not math.isnan(n.interval[0]):
        shown += f", 95 % interval {_interval(*n.interval)}"
    return f"{names}: {shown}{_reason(judged)}."


def _reason(judged: Judged[Any]) -> str:
    n = judged.numbers
    if judged.verdict is Verdict.NONE:
        return f"; {n.obstacle}"
    if judged.verdict in (Verdict.BETTER, Verdict.WORSE):
        return f" ({_p(judged)})"
    margin = n.metric.amount(n.margin, "g")
    if judged.verdict is Verdict.EQUIVALENT:
        return f"; equivalent within {margin}"
    shown = f"; not worse by {margin} or more" if judged.verdict is Verdict.NON_INFERIOR else ""
    return f"{shown}; {_no_difference_shown(judged)}"


def _no_difference_shown(judged: Judged[Any]) -> str:
    """Return why the numbers do not show a difference."""
    n, difference = judged.numbers, judged.evidence.difference
    if not difference.tests:
        return f"not statistically significant ({_p(judged)})"
    if not difference.table:
        return f"undecided, as the means of the main table, over classes, are {_amount(n, n.table_gain)}"
    return "undecided, as the bootstrap over cases and seeds does not confirm it"


def _p(judged: Judged[Any]) -> str:
    p, corrected = p_text(judged.numbers.p), p_text(judged.p_holm.difference)
    text = f"p {'' if p.startswith('<') else '= '}{p}"
    if judged.compared > 1:
        text += f", {corrected} after Holm's correction for {judged.compared} comparisons"
    return text


def _amount(n: Gain, gain: float) -> str:
    way = "" if round(gain, 2) == 0 else " better" if gain > 0 else " worse"
    return f"{n.metric.amount(gain)}{way}"


def _interval(low: float, high: float) -> str:
    if low > 0:
        return f"{low:.2f} to {high:.2f}"
    if high < 0:
        return f"{-high:.2f} to {-low:.2f}"
    return f"{abs(low):.2f} worse to {high:.2f} better"
