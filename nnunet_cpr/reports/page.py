"""Self-contained ``report.html``, rendered from ``page.html.j2``."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.reports import plots
from nnunet_cpr.reports.checks import warnings
from nnunet_cpr.reports.comparisons import CAVEAT, Comparison
from nnunet_cpr.reports.overlays import OTHER, REFERENCE, TRUTH, Overlay, overlays
from nnunet_cpr.reports.plots import HeatMaps, Picture, Stroke
from nnunet_cpr.reports.results import Results, Setting, full_title
from nnunet_cpr.reports.statistics import RESAMPLES, p_number
from nnunet_cpr.reports.tables import (
    Line,
    Table,
    Value,
    case_table,
    class_table,
    layout_notes,
    time_table,
)


@dataclass(frozen=True)
class PairedPlots:
    """Figures of a comparison."""

    title: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class SettingPage:
    """Content of the page for one setting (data set, configuration, plans)."""

    title: str
    warnings: list[str]
    comparisons: list[Comparison]
    comparison_table: Table | None
    classes: Table | None
    cases: Table | None
    paired: list[PairedPlots]
    curves: list[Picture]
    times: Table
    heat_maps: list[tuple[str, HeatMaps]]
    without_history: list[str]
    overlays_with: str
    overlays: list[Overlay]
    overlay_notes: list[str]


def render(
    results: Results,
    main: Table,
    comparisons: list[Comparison],
    raw: Path | None,
    preprocessed: Path | None,
) -> str:
    """Return the page as HTML."""
    study = results.study
    lines = plots.strokes(study)
    settings = [
        _setting_page(
            results, setting, [c for c in comparisons if c.setting == setting], raw, preprocessed
        )
        for setting in results.settings
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = lambda picture: Markup(picture.svg)
    legend: list[tuple[str, Stroke]] = [
        (full_title(entry), lines[entry.trainer]) for entry in study.trainers
    ]
    page = environment.get_template("page.html.j2").render(
        study=study,
        reference=full_title(study.entry(study.reference)),
        main=main,
        main_notes=layout_notes(results),
        settings=settings,
        legend=legend,
        full_title=full_title,
        colours={"truth": TRUTH, "reference": REFERENCE, "other": OTHER},
        notes=results.notes,
        caveat=CAVEAT,
        resamples=f"{RESAMPLES:,}",
    )
    return page.rstrip("\n") + "\n"


def _setting_page(
    results: Results,
    setting: Setting,
    comparisons: list[Comparison],
    raw: Path | None,
    preprocessed: Path | None,
) -> SettingPage:
    study = results.study
    reference = full_title(study.entry(study.reference))
    compared = [c for c in comparisons if c.difference.cases]
    pictures: list[Overlay] = []
    notes: list[str] = []
    best = max(compared, key=lambda c: c.gain, default=None)
    if best is not None:
        pictures, notes = overlays(results, best, raw, preprocessed)
    with_history = [entry for entry in study.trainers if (setting, entry.trainer) in results.histories]
    return SettingPage(
        title=results.title(setting),
        warnings=warnings(results, setting),
        comparisons=comparisons,
        comparison_table=comparison_numbers(compared, reference) if compared else None,
        classes=class_table(results, setting),
        cases=case_table(results, setting),
        paired=[
            PairedPlots(
                f"{full_title(c.entry)} against {reference}",
                (plots.paired_scatter(c, study), plots.difference_histogram(c, study)),
            )
            for c in compared
        ],
        curves=[p for p in (plots.curves(results, setting, m) for m in plots.CURVES) if p is not None],
        times=time_table(results, setting),
        heat_maps=[
            (
                full_title(entry),
                _heat_maps(results, setting, entry.trainer),
            )
            for entry in with_history
        ],
        without_history=[
            full_title(entry)
            for entry in study.trainers
            if entry not in with_history and _has_cpr(entry.trainer)
        ],
        overlays_with=full_title(best.entry) if best is not None else "",
        overlays=pictures,
        overlay_notes=notes,
    )


def comparison_numbers(comparisons: list[Comparison], reference: str) -> Table:
    """Return the numbers of the comparisons of one setting."""
    lines = []
    for c in comparisons:
        d, m = c.difference, c.metric
        texts = (
            m.title,
            c.verdict,
            m.difference_text(d.mean),
            f"{m.difference_text(d.low)} to {m.difference_text(d.high)}",
            f"{m.difference_text(d.bootstrap_low)} to {m.difference_text(d.bootstrap_high)}",
            _p(c.p),
            _p(c.p_holm),
            *map(_probability, astuple(c.equivalence)),
            "yes" if c.non_inferior else "not shown",
            f"{d.folds} x {d.seeds}",
            f"{c.wins} of {d.cases}",
        )
        lines.append(Line(c.entry.full_title, tuple(map(Value, texts))))
    columns = (
        "metric",
        "verdict",
        "difference",
        "95 % interval, t-test",
        "95 % interval, bootstrap",
        "p",
        "p after Holm",
        "P(better)",
        "P(equivalent)",
        "P(worse)",
        "not inferior",
        "folds x seeds",
        "cases better",
    )
    return Table(f"compared with {reference}", columns, tuple(lines))


def _p(p: float) -> str:
    return "-" if math.isnan(p) else p_number(p)


def _probability(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _heat_maps(results: Results, setting: Setting, trainer: str) -> HeatMaps:
    run, history = results.histories[setting, trainer]
    return plots.heat_maps(setting, trainer, run.fold, history)


def _has_cpr(trainer: str) -> bool:
    """Return True if a trainer writes a history of CPR."""
    try:
        name = parse_trainer_name(trainer)
    except WrongName:
        return False
    return name is not None and name.defaults.cpr
