"""Discovery of the trainers by nnU-Net, in every Python process and without any setup.

``nnunet_cpr.pth`` imports this module at interpreter startup. It appends the folder of trainers to
``nnUNet_extTrainer``, the list of folders that nnU-Net searches after its own. Only the standard library
may be imported here.
"""

import os
from importlib.machinery import PathFinder


def trainer_folder() -> "str | None":
    """Return the folder of trainers next to the package, None if there is none."""
    package = PathFinder.find_spec("nnunet_cpr")  # does not import it
    if package is None or not package.submodule_search_locations:
        return None
    parent = os.path.dirname(os.path.abspath(next(iter(package.submodule_search_locations))))
    # "nnunet_cpr_trainers" in an installed wheel, "trainers" in a checkout.
    for name in ("nnunet_cpr_trainers", "trainers"):
        folder = os.path.join(parent, name)
        if os.path.isfile(os.path.join(folder, "nnUNetTrainerCPR.py")):
            return folder
    return None


def register() -> None:
    """Append the folder of trainers to ``nnUNet_extTrainer``, unless it is listed."""
    folder = trainer_folder()
    folders = [f for f in os.environ.get("nnUNet_extTrainer", "").split(os.pathsep) if f]
    if folder is not None and folder not in folders:
        os.environ["nnUNet_extTrainer"] = os.pathsep.join([*folders, folder])


register()
