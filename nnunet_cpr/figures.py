"""Matplotlib figures that neither use nor change global state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import matplotlib
from matplotlib.figure import Figure

from nnunet_cpr.files import atomic_write


@contextmanager
def styled_figure(size: tuple[float, float], style: Mapping[str, Any] | None = None) -> Iterator[Figure]:
    """Yield a figure to draw and save within the context.

    Matplotlib's default style is used whatever others have set, as nnU-Net does for its
    ``progress.png``.

    Args:
        size: width and height in inches.
        style: matplotlib's ``rcParams`` that differ from the defaults.
    """
    rc: Any = {**matplotlib.rcParamsDefault, **(style or {})}
    with matplotlib.rc_context(rc):
        yield Figure(figsize=size, layout="constrained")


@contextmanager
def new_figure(
    target: Path | IO[bytes],
    size: tuple[float, float],
    style: Mapping[str, Any] | None = None,
    **savefig: Any,
) -> Iterator[Figure]:
    """Yield a :func:`styled_figure` that is saved to ``target`` on success.

    Args:
        target: a path, whose suffix gives the format and which is written atomically, or a binary file.
        size: width and height in inches.
        style: matplotlib's ``rcParams`` that differ from the defaults.
        savefig: arguments of ``Figure.savefig``; ``dpi`` is 110 by default.

    Raises:
        OSError: the file cannot be written; a previous one is unchanged.

    Example:
        >>> import io
        >>> with new_figure(io.BytesIO(), (3, 2), format="svg") as figure:
        ...     _ = figure.subplots().plot([0, 1], [0, 1])
    """
    with styled_figure(size, style) as figure:
        yield figure
        savefig = {"dpi": 110, **savefig}
        if isinstance(target, Path):
            with atomic_write(target) as temporary:
                figure.savefig(temporary, **savefig)
        else:
            figure.savefig(target, **savefig)
