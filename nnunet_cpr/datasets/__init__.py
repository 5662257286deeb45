"""Conversion of images, in challenge archives or in folders, to data sets in nnU-Net's raw format.

``nnunet-cpr prepare`` points its user to a study preset of the same name as the data set,
``nnunet_cpr/studies/presets/<name>.yaml``.
"""

from __future__ import annotations

from nnunet_cpr.environment import check_installed

check_installed(__name__)
