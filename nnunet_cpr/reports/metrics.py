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
        sign: 1 if higher is better, -1 for distances.
    """

    name: str
    title: str
    unit: str
    difference_unit: str
    scale: float
    sign: int

    @property
    def column(self) -> str:
        """Name of a CSV column with shown values, such as ``dice_percent``."""
        return f"{self.name}_{self.unit.replace('%', 'percent')}"

    @property
    def heading(self) -> str:
        """Title with the unit, such as "HD95 (mm)"."""
        return f"{self.title} ({self.unit})"

    def amount(self, value: float, style: str = ".2f") -> str:
        """Return an amount without sign, and its unit; ``style`` is "g" for a margin of the study.

        Example:
            >>> METRICS["dice"].amount(-0.45), METRICS["dice"].amount(1, "g")
            ('0.45 points', '1 point')
        """
        number, unit = f"{abs(value):{style}}", self.difference_unit
        return f"{number} {unit.removesuffix('s') if number == '1' else unit}"


METRICS = {
    metric.name: metric
    for metric in (
        Metric("dice", "Dice", "%", "points", scale=100, sign=1),
        Metric("hd95", "HD95", "mm", "mm", scale=1, sign=-1),
        Metric("nsd", "NSD", "%", "points", scale=100, sign=1),
    )
}
"""All metrics by name: Dice, 95th percentile of the Hausdorff distance, normalized surface Dice."""


def value_text(value: float, style: str = ".2f") -> str:
    """Return a shown value with two decimals, or a dash for NaN; "+.2f" adds the sign."""
    return "-" if math.isnan(value) else f"{round(value, 2) + 0.0:{style}}"  # no -0.00


def p_text(p: float) -> str:
    """Return a p-value with two digits, such as "0.61", or a dash for NaN."""
    if math.isnan(p):
        return "-"
    return "< 0.0001" if p < 1e-4 else str(float(f"{p:.2g}")).removesuffix(".0")
