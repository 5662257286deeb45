"""Conversion of challenge archives, as they are shipped, to verified data sets in nnU-Net's raw format.

To add a data set, write a subclass of :class:`~nnunet_cpr.datasets.archive.DataSet` in a module of its
own, such as :mod:`~nnunet_cpr.datasets.btcv`, and add a line to ``DATA_SETS`` in
:mod:`~nnunet_cpr.datasets.registry`.
"""

from __future__ import annotations
