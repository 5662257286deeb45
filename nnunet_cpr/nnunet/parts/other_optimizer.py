"""Weight decay of an optimizer that another trainer builds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def without_weight_decay(parameters: Iterable[Tensor]) -> Iterator[list[dict[str, Any]]]:
    """Give every optimizer that is built in this context no weight decay for some parameters.

    Parameter groups with weight decay are split into these parameters and the others. This happens while
    the optimizer is built, since learning-rate schedulers store a value for each group.

    Args:
        parameters: the parameters without weight decay.

    Yields:
        The settings of each group as it was given, for use after the context. ``is_split`` is True if
        some of its parameters have no weight decay, but others have.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> with without_weight_decay([layer.weight]) as given:
        ...     optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, weight_decay=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(1, 0.0), (1, 0.1)]
        >>> given
        [{'lr': 0.01, 'weight_decay': 0.1, 'is_split': True}]
    """
    given_groups: list[dict[str, Any]] = []
    chosen = {id(parameter) for parameter in parameters}
    add_param_group = Optimizer.add_param_group

    def add_split(self: Optimizer, group: dict[str, Any]) -> None:
        settings = {"weight_decay": 0, "lr": None, **self.defaults, **group}
        decay, given = settings["weight_decay"], group["params"]
        parts: tuple[list, list] = [], []
        for member in [given] if isinstance(given, Tensor) else given:
            parts[bool(decay) and _id(member) in chosen].append(member)
        others, without = parts
        is_split = bool(others and without)
        given_groups.append({"lr": settings["lr"], "weight_decay": decay, "is_split": is_split})
        if without:
            add_param_group(self, {**group, "params": without, "weight_decay": 0.0})
        if others or not without:
            add_param_group(self, {**group, "params": others})

    Optimizer.add_param_group = add_split  # type: ignore
    try:
        yield given_groups
    finally:
        Optimizer.add_param_group = add_param_group  # type: ignore


def _id(member: Any) -> int:
    """Return the id of a parameter, given with or without a name."""
    return id(member[1] if isinstance(member, tuple) else member)
