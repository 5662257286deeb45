"""Names that carry the settings of an optimizer and its regularizer: ``AdamCPR_ws2000_mu0p5_lr1en3``.

A trainer of nnU-Net is chosen by its name and by nothing else, and a result folder is named after it;
so is every run of :mod:`nnunet_cpr.vision`. Numbers are spelt as in nnU-Net's own trainer names: 1e-3 is
``1en3``, 0.5 is ``0p5``. Suffixes may come in any order.

The grammar of what all names share is here, and the machinery that a kind of names extends: a subclass
of :class:`MethodName` with its families and with the suffixes for its further fields.
"""

from nnunet_cpr._spelling import WrongName
from nnunet_cpr.names.method import Family, MethodName
from nnunet_cpr.names.parsing import parse
from nnunet_cpr.names.suffixes import METHOD_SUFFIXES, BaselineChoice, Suffix, count

__all__ = [
    "METHOD_SUFFIXES",
    "BaselineChoice",
    "Family",
    "MethodName",
    "Suffix",
    "WrongName",
    "count",
    "parse",
]
