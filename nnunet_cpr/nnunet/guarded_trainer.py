"""nnU-Net's trainer on which no other class can take a name of this package.

Trainers are composed by inheritance, so that attributes of every class stand side by side on one object.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NoReturn

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GuardedTrainer(nnUNetTrainer):
    """nnU-Net's trainer that refuses attributes of other trainers with our names.

    All names of our classes that ``nnUNetTrainer`` does not have are ours (:func:`kept_names`). They are
    methods and properties: what we store stands in attributes with two leading underscores, which Python
    gives the name of their class. So whoever sets one of our names, in a class or later on the object,
    means something else, and the training ends with one line.
    """

    __kept: ClassVar[frozenset[str]]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.__kept = kept_names(cls)

    def __init__(self, **arguments: Any) -> None:
        # By keyword, since other trainers may have their parameters in another order.
        super().__init__(**arguments)
        for base in type(self).__mro__:
            if not issubclass(base, GuardedTrainer):
                for name in sorted(self.__kept.intersection(vars(base))):
                    self._refuse_name(name, base.__name__)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__kept:
            other = type(self).other_trainer()
            is_other = other is not nnUNetTrainer
            self._refuse_name(name, other.__name__ if is_other else type(self).__name__)
        super().__setattr__(name, value)

    def _refuse_name(self, name: str, other: str) -> NoReturn:
        self._exit(f"{other}: the attribute {name!r} has another meaning in nnunet-cpr; rename it there")

    @classmethod
    def other_trainer(cls) -> type[nnUNetTrainer]:
        """Return the first base class that is not from this package, ``nnUNetTrainer`` or another."""
        others = (base for base in cls.__mro__ if not issubclass(base, GuardedTrainer))
        return next(base for base in others if issubclass(base, nnUNetTrainer))

    @property
    def unwrapped_network(self) -> nn.Module:
        """Network without the wrappers of distributed training and ``torch.compile``."""
        network: Any = self.network
        if isinstance(network, DistributedDataParallel):
            network = network.module
        return getattr(network, "_orig_mod", network)

    def _warn(self, message: str) -> None:
        """Write a message of rank 0 to the log and in one line to stderr."""
        if getattr(self, "local_rank", 0) == 0:
            if hasattr(self, "log_file"):  # not yet, amid the other trainer's __init__
                self.print_to_log_file(f"WARNING! {message}", also_print_to_console=False)
            print(f"nnunet-cpr: {message}", file=sys.stderr)

    def _exit(self, message: str) -> NoReturn:
        """End the training with a message."""
        self._warn(message)
        rank = getattr(self, "local_rank", 0)
        if rank != 0:  # the others may go on, and would wait for this one
            print(f"nnunet-cpr: rank {rank}: {message}", file=sys.stderr)
        raise SystemExit(1)


def kept_names(trainer: type[GuardedTrainer]) -> frozenset[str]:
    """Return the names of this package on a trainer that nnU-Net's trainer does not have."""
    package = __name__.partition(".")[0]
    own = [base for base in trainer.__mro__ if base.__module__.partition(".")[0] == package]
    names = {"settings"}.union(*map(vars, own)).difference(dir(nnUNetTrainer))
    return frozenset(name for name in names if "__" not in name)  # those of one class
