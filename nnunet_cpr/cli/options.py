"""Options that several commands share.

The options of a command are the fields of a dataclass, which :func:`expand_options` turns into options
of the command line. Those that several dataclasses have are ``Annotated`` types.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, get_type_hints

import typer

from nnunet_cpr import spelling
from nnunet_cpr.environment import available_cores
from nnunet_cpr.refusals import Refusal

ProcessesOption = Annotated[
    int, typer.Option("--processes", "-np", min=1, help="Number of parallel processes.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
DEFAULT_PROCESSES = min(8, available_cores())


def print_json(content: Any) -> None:
    """Print JSON; enumerations and paths become text, numbers that are not finite null.

    Example:
        >>> print_json([float("nan")])
        [
         null
        ]
    """
    as_text = lambda value: value.value if isinstance(value, Enum) else str(value)  # noqa: E731
    text = json.dumps(content, default=as_text)
    print(json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1))


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes each field of its parameter ``options`` as an option.

    Args:
        command: function for Typer; the type of ``options`` is a dataclass whose fields are annotated as
            Typer's options are.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Options:
        ...     steps: Annotated[int, typer.Option(help="Number of steps.")] = 10
        >>> @expand_options
        ... def train(options: Options, name: str) -> None:
        ...     print(name, options)
        >>> list(inspect.signature(train).parameters)
        ['steps', 'name']
        >>> train(name="SGD", steps=5)
        SGD Options(steps=5)
    """
    others = dict(inspect.signature(command, eval_str=True).parameters)
    kind = others.pop("options").annotation
    fields = inspect.signature(kind).parameters
    types = get_type_hints(kind, include_extras=True)  # of its base classes, in their modules, too

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        given["options"] = kind(**{name: given.pop(name) for name in fields})
        command(**given)

    options = [each.replace(annotation=types[name]) for name, each in fields.items()]
    parameters = [*options, *others.values()]
    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    expanded.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return expanded


def parse_numbers(option: str, text: str | None) -> list[int]:
    """Parse the value of ``--folds`` or ``--seeds``, such as ``1-3``; empty without one.

    Raises:
        Refusal: it is not a list of numbers.

    Example:
        >>> parse_numbers("--seeds", "1-3")
        [1, 2, 3]
    """
    try:
        return [] if text is None else spelling.parse_numbers(option[2:-1], text)
    except ValueError as error:
        raise Refusal(f"{option}: {error}, got {text!r}") from error
