"""Extension of griffe: turn the Sphinx markup of the docstrings into Markdown of the site."""

from __future__ import annotations

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr|exc):`(~?)([\w.]+)`")
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)  # griffe's section is named Examples
_MATH = re.compile(r"^\.\. math::\n((?:[ \t]+.*\n|\n)+)", re.MULTILINE)


def to_markdown(text: str) -> str:
    """Return a docstring with roles as links, examples as a section and formulas as MathML."""
    return _EXAMPLE.sub("Examples:", _MATH.sub(_formula, _ROLE.sub(_link, text)))


def _link(match: re.Match[str]) -> str:
    is_short, path = match.groups()
    text = path.rpartition(".")[2] if is_short else path
    # An optional reference is plain text where the object has no page.
    return f'<autoref optional identifier="{path}"><code>{text}</code></autoref>'


def _formula(match: re.Match[str]) -> str:
    # MathML, which browsers draw without scripts and fonts.
    formula = " ".join(match[1].split())
    if "&" in formula:
        formula = rf"\begin{{align*}} {formula} \end{{align*}}"
    return f'<div class="formula">{convert(formula, display="block")}</div>\n\n'


class SphinxMarkup(griffe.Extension):
    """Apply :func:`to_markdown` to all docstrings."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
