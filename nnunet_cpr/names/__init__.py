"""Names that encode an optimizer, its regularization and their settings: ``AdamCPR_ws2000_lr1en3``.

nnU-Net selects a trainer by its class name alone and names the result folder after it; the runs of
:mod:`nnunet_cpr.vision` are named in the same way. Numbers are spelt as in nnU-Net's own trainer names:
1e-3 is ``1en3``, 0.5 is ``0p5``. Suffixes may come in any order.

:class:`~nnunet_cpr.names.trainer_name.TrainerName` holds the settings,
:data:`~nnunet_cpr.names.suffixes.SUFFIXES` is the table of their notations, which parses and prints
them, and :func:`~nnunet_cpr.names.trainer_name.parse_name` is the only parser. All that a name trains,
with every default spelled out, is a :class:`~nnunet_cpr.names.training.Training`. To add a setting: a
field of ``TrainerName`` and of ``Training``, and a :class:`~nnunet_cpr.names.suffixes.Suffix` in the
table. Trainers apply it in the parts of :mod:`nnunet_cpr.nnunet.parts`.
"""

from nnunet_cpr.names.suffixes import BaselineChoice, WarmStartShare
from nnunet_cpr.spelling import WrongName

__all__ = ["BaselineChoice", "WarmStartShare", "WrongName"]
