"""Options that several commands share.

Options that belong together are the fields of a dataclass, which :func:`expand_settings` turns into
options of the command line. Single ones are ``Annotated`` types.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import typer

from nnunet_cpr import _spelling
from nnunet_cpr._cores import available_cores
from nnunet_cpr.cli._errors import stop

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


def expand_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of each dataclass among its parameters as options.

    Args:
        command: function for Typer; a parameter whose type is a dataclass becomes its fields, which are
            annotated as Typer's options are.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     steps: Annotated[int, typer.Option(help="Number of steps.")] = 10
        >>> @expand_settings
        ... def train(name: str, settings: Settings) -> None:
        ...     print(name, settings)
        >>> list(inspect.signature(train).parameters)
        ['name', 'steps']
        >>> train(name="SGD", steps=5)
        SGD Settings(steps=5)
    """
    settings: dict[str, Any] = {}  # dataclasses by parameter
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind: Any = parameter.annotation
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            settings[parameter.name] = kind
            parameters += inspect.signature(kind, eval_str=True).parameters.values()
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        for name, kind in settings.items():
            given[name] = kind(
                **{field.name: given.pop(field.name) for field in dataclasses.fields(kind)}
            )
        command(**given)

    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    expanded.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return expanded


def parse_numbers(option: str, text: str | None) -> list[int]:
    """Parse the value of ``--folds`` or ``--seeds``, such as ``1-3``; empty without one.

    Raises:
        typer.Exit: it is not a list of numbers; one line is printed on stderr.

    Example:
        >>> parse_numbers("--seeds", "1-3")
        [1, 2, 3]
    """
    try:
        return [] if text is None else _spelling.parse_numbers(option[2:-1], text)
    except ValueError as error:
        stop(f"{option}: {error}, got {text!r}")
