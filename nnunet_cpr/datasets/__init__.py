"""From a challenge's archive as it is shipped to a checked data set in nnU-Net's raw format.

A new data set is a subclass of :class:`~nnunet_cpr.datasets.archive.DataSet` in a module of its
own and a line of ``DATA_SETS`` in :mod:`~nnunet_cpr.datasets.registry`.
"""

from __future__ import annotations
