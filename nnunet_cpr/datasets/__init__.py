"""Conversion of challenge archives, as they are shipped, to data sets in nnU-Net's raw format.

To add a data set, write a subclass of :class:`~nnunet_cpr.datasets.archive.DataSet` in a module of its
own, such as :mod:`~nnunet_cpr.datasets.btcv`, and add a line to ``DATA_SETS`` in
:mod:`~nnunet_cpr.datasets.registry`. ``nnunet-cpr prepare`` points its user to a study
preset of the same name, ``nnunet_cpr/studies/presets/<name>.yaml``.
"""

from __future__ import annotations

from nnunet_cpr.environment import check_installed

check_installed(__name__)
