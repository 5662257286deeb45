"""Self-contained ``report.html``, rendered from ``page.html.j2``."""

from __future__ import annotations

import math
import re
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nnunet_cpr.reports import plots
from nnunet_cpr.reports.checks import find_warnings
from nnunet_cpr.reports.comparisons import Comparison, class_differences
from nnunet_cpr.reports.figures import Drawing
from nnunet_cpr.reports.metrics import METRICS, Metric
from nnunet_cpr.reports.non_inferiority import NonInferiority, in_words
from nnunet_cpr.reports.overlays import Overlay, overlays
from nnunet_cpr.reports.plots import ForestRow, HeatMaps, Picture, Stroke
from nnunet_cpr.reports.renderers import Line, Table, Value
from nnunet_cpr.reports.results import Results, Setting, in_order
from nnunet_cpr.reports.statistics import RESAMPLES, p_number
from nnunet_cpr.reports.tables import case_table, class_table, layout_notes, time_table
from nnunet_cpr.reports.verdicts import CAVEAT
from nnunet_cpr.studies.run_state import parse_trainer


@dataclass(frozen=True)
class PairedPlots:
    """Figures of a comparison."""

    title: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class MetricClasses:
    """Classes of one setting by one metric: means, and differences to the reference."""

    metric: Metric
    means: Table
    forest: list[Picture]
    differences: Table | None


@dataclass(frozen=True)
class SettingPage:
    """Content of the page for one setting (data set, configuration, plans)."""

    title: str
    warnings: list[str]
    comparisons: list[Comparison]
    comparison_table: Table | None
    components: Table | None
    non_inferior: list[str]
    classes: list[MetricClasses]
    cases: list[tuple[Metric, Table]]
    paired: list[PairedPlots]
    curves: list[Picture]
    times: Table
    heat_maps: list[tuple[str, HeatMaps]]
    without_history: list[str]
    overlays_with: str
    overlays: list[Overlay]
    overlay_notes: list[str]

    @property
    def class_colours(self) -> list[tuple[str, str]]:
        """Names and colours of the classes in the pictures of cases."""
        return in_order([each for overlay in self.overlays for each in overlay.classes])

    @property
    def drawings(self) -> list[Drawing]:
        """All figures, to be written as files."""
        pictures = [picture for classes in self.classes for picture in classes.forest]
        pictures += [picture for pair in self.paired for picture in pair.pictures]
        pictures += self.curves
        pictures += [m for _, maps in self.heat_maps for m in (maps.multiplier, maps.ratio)]
        return [picture.drawing for picture in pictures] + [each.drawing for each in self.overlays]


def render(
    results: Results,
    main: Table,
    comparisons: list[Comparison],
    non_inferior: list[NonInferiority],
    raw: Path | None,
    preprocessed: Path | None,
) -> tuple[str, list[Drawing]]:
    """Return the page as HTML, and its figures."""
    study = results.study
    lines = plots.strokes(study)
    settings = [
        _setting_page(
            results,
            setting,
            [c for c in comparisons if c.setting == setting],
            in_words(non_inferior, setting),
            raw,
            preprocessed,
        )
        for setting in results.settings
    ]
    reference = comparisons[0].reference if comparisons else study.entry(study.reference)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = lambda picture: Markup(picture.svg)
    environment.filters["breakable"] = breakable
    drawn = plots.drawn_trainers(results)
    legend: list[tuple[str, Stroke]] = [(entry.full_title, lines[entry.trainer]) for entry in drawn]
    page = environment.get_template("page.html.j2").render(
        study=study,
        reference=reference.full_title,
        main=main,
        main_notes=layout_notes(results),
        settings=settings,
        legend=legend,
        left_out=len(study.trainers) - len(drawn),
        max_drawn=plots.MAX_DRAWN,
        max_thin_lines=plots.MAX_THIN_LINES,
        first_metric=METRICS[study.metrics[0]],
        metrics=[METRICS[name] for name in study.metrics],
        notes=results.notes,
        caveat=CAVEAT,
        resamples=f"{RESAMPLES:,}",
    )
    return page.rstrip("\n") + "\n", [each for setting in settings for each in setting.drawings]


def _setting_page(
    results: Results,
    setting: Setting,
    comparisons: list[Comparison],
    non_inferior: list[str],
    raw: Path | None,
    preprocessed: Path | None,
) -> SettingPage:
    study = results.study
    compared = [c for c in comparisons if c.difference.cases]
    drawn = plots.drawn_trainers(results)
    shown = [c for c in _drawn(results, compared) if c.metric.name == study.metrics[0]]
    pictures: list[Overlay] = []
    notes: list[str] = []
    best = max(shown, key=lambda c: c.gain, default=None)
    if best is not None:
        pictures, notes = overlays(results, best, raw, preprocessed)
    with_history = [entry for entry in drawn if (setting, entry.trainer) in results.histories]
    return SettingPage(
        title=results.title(setting),
        warnings=find_warnings(results, setting),
        comparisons=comparisons,
        comparison_table=comparison_numbers(compared) if compared else None,
        components=component_table(compared) if compared else None,
        non_inferior=non_inferior,
        classes=_classes(results, setting, _drawn(results, compared)),
        cases=[
            (METRICS[name], table)
            for name in study.metrics
            if (table := case_table(results, setting, METRICS[name], drawn)) is not None
        ],
        paired=[
            PairedPlots(
                f"{c.entry.full_title} against {c.reference.full_title}",
                (plots.paired_scatter(c), plots.difference_histogram(c)),
            )
            for c in shown
        ],
        curves=[p for p in (plots.curves(results, setting, m) for m in plots.CURVES) if p is not None],
        times=time_table(results, setting),
        heat_maps=[
            (entry.full_title, _heat_maps(results, setting, entry.trainer)) for entry in with_history
        ],
        without_history=[
            entry.full_title for entry in drawn if entry not in with_history and _has_cpr(entry.trainer)
        ],
        overlays_with=best.entry.full_title if best is not None else "",
        overlays=pictures,
        overlay_notes=notes,
    )


def _drawn(results: Results, comparisons: list[Comparison]) -> list[Comparison]:
    """Return the comparisons of the trainers in figures; selected settings are all drawn."""
    study = [entry.trainer for entry in results.study.trainers]
    names = [entry.trainer for entry in plots.drawn_trainers(results)]
    return [c for c in comparisons if c.entry.trainer in names or c.entry.trainer not in study]


def _classes(results: Results, setting: Setting, comparisons: list[Comparison]) -> list[MetricClasses]:
    """Return the classes by each metric of the study."""
    parts = []
    differences = class_differences(results, comparisons)
    for name in results.study.metrics:
        metric = METRICS[name]
        means = class_table(results, setting, metric)
        if means is None:
            continue
        mine = [c for c in comparisons if c.metric == metric]
        rows: list[ForestRow] = []
        for c in mine:
            title, d = c.entry.full_title, c.difference
            of_trainer = differences[
                (differences["metric"] == name) & (differences["trainer"] == c.entry.trainer)
            ]
            columns = ["class", "difference", "interval_low", "interval_high"]
            rows += [
                ForestRow(title, *row) for row in of_trainer[columns].itertuples(index=False, name=None)
            ]
            rows.append(ForestRow(title, "mean", d.mean, d.low, d.high))
        forest = []
        if rows:
            reference = mine[0].reference.full_title
            forest = plots.forest_plots(rows, metric, mine[0].margin, reference, setting)
        parts.append(MetricClasses(metric, means, forest, _class_differences(rows, metric)))
    return parts


def _class_differences(rows: list[ForestRow], metric: Metric) -> Table | None:
    """Return the numbers of the forest plots."""
    if not rows:
        return None
    lines = []
    for trainer, of_trainer in groupby(rows, key=lambda row: row.trainer):
        values = []
        for row in of_trainer:
            low, high = metric.difference_text(row.low), metric.difference_text(row.high)
            below = () if math.isnan(row.low) else (f"{low} to {high}",)
            values.append(Value(metric.difference_text(row.difference), below))
        lines.append(Line(trainer, tuple(values)))
    return Table("trainer", tuple(in_order([row.name for row in rows])), tuple(lines))


def comparison_numbers(comparisons: list[Comparison]) -> Table:
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
            " / ".join(map(_probability, astuple(c.equivalence))),
            f"{d.folds} x {d.seeds}",
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
        "P(better / equivalent / worse)",
        "folds x seeds",
    )
    return Table(f"compared with {comparisons[0].reference.full_title}", columns, tuple(lines))


def component_table(comparisons: list[Comparison]) -> Table:
    """Return the standard deviations of the differences by source."""
    lines = []
    for c in comparisons:
        texts = (
            "-" if math.isnan(value) else f"{value:.2f}" for value in astuple(c.difference.components)
        )
        unit = f"{c.metric.title}, {c.metric.difference_unit}"
        lines.append(Line(c.entry.full_title, tuple(map(Value, (unit, *texts)))))
    columns = ("metric", "cases", "folds", "seeds", "trainings", "residual")
    return Table("standard deviation between", columns, tuple(lines))


def _p(p: float) -> str:
    return "-" if math.isnan(p) else p_number(p)


def _probability(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _heat_maps(results: Results, setting: Setting, trainer: str) -> HeatMaps:
    return plots.heat_maps(setting, *results.histories[setting, trainer])


def breakable(text: str) -> Markup:
    """Return a text as HTML whose lines may end within a long name, at "_" and before capitals.

    Example:
        >>> breakable("nnUNetTrainerSGD_seed1")
        Markup('nnUNetTrainer<wbr>SGD_<wbr>seed1')
    """
    parts = re.split(r"(?<=[_/])(?=\w)|(?<=[a-z0-9]{3})(?=[A-Z]\w)", text)
    return Markup("<wbr>").join(parts)


def _has_cpr(trainer: str) -> bool:
    """Return True if a trainer writes a history of CPR."""
    name = parse_trainer(trainer)
    return name is not None and name.defaults.cpr
