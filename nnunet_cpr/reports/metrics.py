"""Segmentation metrics that a report can show."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric of a report.

    Attributes:
        name: name in the study file, in the tables of results and in CSV files.
        title: name on the page.
        unit: unit of a shown value, ``"%"`` or ``"mm"``.
        difference_unit: unit of a shown difference, ``"points"`` or ``"mm"``.
        scale: factor from a value in the tables of results to a shown one.
        higher_is_better: False for distances.
        decimals: decimals of a shown value.
        description: one sentence for the methods section.
    """

    name: str
    title: str
    unit: str
    difference_unit: str
    scale: float
    higher_is_better: bool
    decimals: int
    description: str

    @property
    def column(self) -> str:
        """Name of a CSV column with shown values, such as ``dice_percent``."""
        return f"{self.name}_{self.unit.replace('%', 'percent')}"

    @property
    def heading(self) -> str:
        """Title with the unit, such as "HD95 (mm)"."""
        return f"{self.title} ({self.unit})"

    def amount(self, value: float) -> str:
        """Return an amount such as a margin with its unit.

        Example:
            >>> METRICS["dice"].amount(0.1), METRICS["dice"].amount(1)
            ('0.1 points', '1 point')
        """
        unit = self.difference_unit
        return f"{value:g} {unit.removesuffix('s') if value == 1 else unit}"

    def text(self, value: float) -> str:
        """Return a shown value with the metric's decimals, or a dash for NaN.

        Args:
            value: a value that is already scaled.

        Example:
            >>> METRICS["dice"].text(89.456), METRICS["hd95"].text(float("nan"))
            ('89.46', '-')
        """
        return "-" if math.isnan(value) else f"{value:.{self.decimals}f}"

    def difference_text(self, value: float) -> str:
        """Return a shown difference with its sign, or a dash for NaN.

        Example:
            >>> METRICS["dice"].difference_text(0.5)
            '+0.50'
        """
        return "-" if math.isnan(value) else f"{value:+.{self.decimals}f}"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="dice",
            title="Dice",
            unit="%",
            difference_unit="points",
            scale=100,
            higher_is_better=True,
            decimals=2,
            description="Dice similarity coefficient; higher is better.",
        ),
        Metric(
            name="hd95",
            title="HD95",
            unit="mm",
            difference_unit="mm",
            scale=1,
            higher_is_better=False,
            decimals=2,
            description="95th percentile of the Hausdorff distance of the surfaces; lower is better.",
        ),
        Metric(
            name="nsd",
            title="NSD",
            unit="%",
            difference_unit="points",
            scale=100,
            higher_is_better=True,
            decimals=2,
            description="Normalized surface Dice; higher is better.",
        ),
    )
}
"""All metrics by name."""
