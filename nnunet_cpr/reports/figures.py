"""Figures in three formats: SVG for the page, and PDF and SVG files for papers."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from nnunet_cpr._figures import new_figure
from nnunet_cpr._files import atomic_write

INDEX = "files.txt"
"""List of the files in the folder of figures that a report wrote."""
_LONGEST_NAME = 180
"""Characters of a file's name without suffix; a file system allows 255 bytes with all suffixes."""
_NO_DATE = {
    "svg": dict.fromkeys(["Creator", "Date", "Format", "Type"]),
    "pdf": dict.fromkeys(["Creator", "Producer", "CreationDate"]),
}
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "nnunet-cpr",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType fonts, embedded
    "font.size": 9,
    "font.family": "sans-serif",
}


class Drawing:
    """A figure's bytes in each format, complete after the ``with`` block of :func:`draw`.

    Attributes:
        name: name of the files, without suffix.
        files: bytes by suffix, ``pdf`` and ``svg``, on white and with embedded fonts.
        inline: transparent SVG whose text is text.
        finish: function that adds to the figure what only the files have, such as a legend.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.files: dict[str, bytes] = {}
        self.inline = ""
        self.finish: Callable[[], object] | None = None


@contextmanager
def draw(
    name: str,
    size: tuple[float, float],
    style: Mapping[str, Any] | None = None,
    dpi: int = 100,
    inline: bool = True,
) -> Iterator[tuple[Figure, Drawing]]:
    """Yield a figure and its drawing; at the end the figure is saved in each format.

    Args:
        name: name of the files, without suffix.
        size: width and height in inches.
        style: matplotlib's ``rcParams`` that differ from the report's.
        dpi: resolution of images in the figure.
        inline: False leaves out the SVG of the page.
    """
    drawing = Drawing(file_name(name))
    pdf = io.BytesIO()
    with new_figure(
        pdf,
        size,
        {**_STYLE, **(style or {})},
        format="pdf",
        dpi=dpi,
        metadata=_NO_DATE["pdf"],
        facecolor="white",
    ) as figure:
        yield figure, drawing
        if inline:
            svg = io.BytesIO()
            figure.savefig(svg, format="svg", dpi=dpi, metadata=_NO_DATE["svg"], transparent=True)
            drawing.inline = svg.getvalue().decode()
            if drawing.finish is None:
                figure.set_layout_engine("none")  # the layout is computed once for all formats
            else:
                drawing.finish()
        with matplotlib.rc_context({"svg.fonttype": "path"}):
            svg = io.BytesIO()
            figure.savefig(svg, format="svg", dpi=dpi, metadata=_NO_DATE["svg"], facecolor="white")
            drawing.files["svg"] = svg.getvalue()
        figure.set_layout_engine("none")
    drawing.files["pdf"] = pdf.getvalue()


def file_name(text: str) -> str:
    """Return a name for a file; long ones are cut and get a digest.

    Example:
        >>> file_name("curve-my trainer")
        'curve-my_trainer'
    """
    name = re.sub(r"[^\w.+-]", "_", text)
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name.encode()[: _LONGEST_NAME - 9].decode(errors="ignore") + "-" + digest


def write_figures(folder: Path, drawings: Iterable[Drawing]) -> None:
    """Write all files, and remove those of an earlier report that are not written again.

    Other files in the folder are left alone.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / INDEX
    contents = {
        f"{drawing.name}.{suffix}": content
        for drawing in drawings
        for suffix, content in sorted(drawing.files.items())
    }
    try:
        earlier = index.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        earlier = []
    # The index names old and new files until all are written: a report that is stopped leaves none.
    _write_index(index, {*earlier, *contents})
    for name, content in contents.items():
        with atomic_write(folder / name) as temporary:
            temporary.write_bytes(content)
    for name in earlier:
        # A name from the index is a plain name of a figure, whatever somebody has written to it.
        if name not in contents and re.fullmatch(r"[\w.+-]+\.(pdf|svg)", name):
            (folder / name).unlink(missing_ok=True)
    _write_index(index, contents)


def _write_index(index: Path, names: Iterable[str]) -> None:
    with atomic_write(index) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
