"""Names that encode an optimizer, its regularization and their settings: ``AdamCPR_ws2000_lr1en3``.

nnU-Net selects a trainer by its class name alone and names the result folder after it; the runs of
:mod:`nnunet_cpr.vision` are named in the same way. Numbers are spelt as in nnU-Net's own trainer names:
1e-3 is ``1en3``, 0.5 is ``0p5``. Suffixes may come in any order.

Two kinds of names exist, each a subclass of :class:`MethodName` with its families and suffixes:
:mod:`~nnunet_cpr.names.trainer_name` for nnU-Net's trainers, parsed by ``parse_trainer_name``, and
:mod:`~nnunet_cpr.names.run_name` for other runs, parsed by ``parse_run_name``. Both use
:func:`parse_name`. To add a setting of trainers or of runs: a field of the subclass and a
:class:`Suffix` in its ``SUFFIXES``; of both: in :class:`MethodName` and :data:`METHOD_SUFFIXES`.
Trainers apply it in ``NamedTrainer`` of :mod:`nnunet_cpr.nnunet.base_trainer`.
"""

from nnunet_cpr._spelling import WrongName
from nnunet_cpr.names.method import Family, MethodName
from nnunet_cpr.names.parsing import parse_name
from nnunet_cpr.names.suffixes import METHOD_SUFFIXES, BaselineChoice, Suffix, WarmStartShare, count

__all__ = [
    "METHOD_SUFFIXES",
    "BaselineChoice",
    "Family",
    "MethodName",
    "Suffix",
    "WarmStartShare",
    "WrongName",
    "count",
    "parse_name",
]
