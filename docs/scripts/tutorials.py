"""Write the notebooks of the tutorials, and their figures: ``python docs/scripts/tutorials.py``.

A notebook has the text and the code blocks of its page. With ``--figures`` the Python blocks of
plain-pytorch are run, and each ``plt.show()`` writes the figure that the page shows next.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import nbformat

TUTORIALS = Path(__file__).parents[1] / "tutorials"
PAGES = ("plain-pytorch", "hippocampus")

_BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_IMAGE = re.compile(r"^!\[.*?\]\((.*?)\)\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


def notebook(page: str) -> str:
    """Return the notebook of a page, without outputs."""
    text = (TUTORIALS / f"{page}.md").read_text()
    cells = []
    position = 0
    for match in _BLOCK.finditer(text):
        cells.append(_markdown(text[position : match.start()]))
        language, code = match.groups()
        cells.append(nbformat.v4.new_code_cell(code.rstrip() if language == "python" else _shell(code)))
        position = match.end()
    cells.append(_markdown(text[position:]))
    cells = [cell for cell in cells if cell.source]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # not random, so that equal pages give equal notebooks
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    return nbformat.writes(made) + "\n"


def _shell(code: str) -> str:
    lines = code.splitlines()
    if all(line.startswith("export ") for line in lines):
        # A variable that a shell cell sets ends with the cell.
        pairs = [line.removeprefix("export ").split("=") for line in lines]
        sets = [f'os.environ["{name}"] = os.path.expandvars("{value}")' for name, value in pairs]
        return "\n".join(["import os", "", 'os.environ["PWD"] = os.getcwd()', *sets])
    return f"%%bash\nset -e\n{code.rstrip()}"


def _markdown(text: str) -> nbformat.NotebookNode:
    # Links to other pages lead nowhere from a notebook that was downloaded.
    text = _LINK.sub(r"\1", _IMAGE.sub("", _COMMENT.sub("", text)))
    return nbformat.v4.new_markdown_cell(text.strip())


def draw(page: str, output: Path) -> None:
    """Run the Python blocks of a page and write the figures that it shows after ``plt.show()``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    text = (TUTORIALS / f"{page}.md").read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    for match in _BLOCK.finditer(text):
        if match[1] != "python":
            continue
        image = _IMAGE.search(text, match.end())

        def show(image: re.Match[str] | None = image) -> None:
            assert image is not None
            plt.gcf().tight_layout()
            plt.savefig(output / Path(image[1]).name, dpi=90)
            plt.close("all")

        plt.show = show
        exec(compile(match[2], page, "exec", dont_inherit=True), names)


def main() -> None:
    """Write or check the notebooks, or draw the figures."""
    parser = argparse.ArgumentParser(description="Write the notebooks of the tutorials.")
    parser.add_argument("--check", action="store_true", help="Write nothing; report old notebooks.")
    parser.add_argument("--figures", action="store_true", help="Draw the figures of plain-pytorch.")
    parser.add_argument("--output", type=Path, default=TUTORIALS.parent / "figures", help="For figures.")
    given = parser.parse_args()
    old = []
    for page in PAGES:
        path = TUTORIALS / f"{page}.ipynb"
        made = notebook(page)
        if not path.exists() or path.read_text() != made:
            old.append(path.name)
            if not given.check:
                path.write_text(made)
    for name in old:
        print(f"{name} is out of date; run this script" if given.check else f"wrote {name}")
    if given.figures:
        draw("plain-pytorch", given.output)
    sys.exit(1 if given.check and old else 0)


if __name__ == "__main__":
    main()
