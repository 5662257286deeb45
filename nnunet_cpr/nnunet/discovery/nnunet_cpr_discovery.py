"""Lets nnU-Net find the trainers of nnunet-cpr, in every Python process and with nothing to set up.

``nnunet_cpr.pth`` imports this module when an interpreter starts. It appends the folder of trainers
to ``nnUNet_extTrainer``, the list of folders that nnU-Net searches after its own.
"""

import os

TRAINERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nnunet_cpr_trainers")


def register() -> None:
    folders = [f for f in os.environ.get("nnUNet_extTrainer", "").split(os.pathsep) if f]
    if TRAINERS not in folders and os.path.isdir(TRAINERS):
        os.environ["nnUNet_extTrainer"] = os.pathsep.join([*folders, TRAINERS])


register()
