"""Weight decay of an optimizer that another trainer builds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@dataclass
class GivenGroups:
    """Values that the parameter groups of optimizers were given.

    Attributes:
        learning_rates, weight_decays: different values of all groups.
        count, split: number of groups, and of those among them that were split.
    """

    learning_rates: set[Any] = field(default_factory=set)
    weight_decays: set[Any] = field(default_factory=set)
    count: int = 0
    split: int = 0


@contextmanager
def without_weight_decay(parameters: Iterable[Tensor]) -> Iterator[GivenGroups]:
    """Give every optimizer that is built in this context no weight decay for some parameters.

    Parameter groups with weight decay are split into these parameters and the others. This happens while
    the optimizer is built, since learning-rate schedulers store a value for each group.

    Args:
        parameters: the parameters without weight decay.

    Yields:
        The groups as they were given, for use after the context.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> with without_weight_decay([layer.weight]) as given:
        ...     optimizer = torch.optim.SGD(layer.parameters(), weight_decay=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(1, 0.0), (1, 0.1)]
        >>> given.weight_decays, given.count, given.split
        ({0.1}, 1, 1)
    """
    given_groups = GivenGroups()
    chosen = {id(parameter) for parameter in parameters}
    add_param_group = Optimizer.add_param_group

    def add_split(self: Optimizer, group: dict[str, Any]) -> None:
        given = group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        decay = group.get("weight_decay", self.defaults.get("weight_decay", 0))
        given_groups.count += 1
        given_groups.learning_rates.add(group.get("lr", self.defaults.get("lr")))
        given_groups.weight_decays.add(decay)
        if decay:
            without = [member for member in members if _id(member) in chosen]
            members = [member for member in members if _id(member) not in chosen]
            if without:
                add_param_group(self, {**group, "params": without, "weight_decay": 0.0})
                if not members:
                    return
                given_groups.split += 1
        add_param_group(self, {**group, "params": members})

    Optimizer.add_param_group = add_split  # type: ignore
    try:
        yield given_groups
    finally:
        Optimizer.add_param_group = add_param_group  # type: ignore


def _id(member: Any) -> int:
    """Return the id of a parameter, given with or without a name."""
    return id(member[1] if isinstance(member, tuple) else member)
