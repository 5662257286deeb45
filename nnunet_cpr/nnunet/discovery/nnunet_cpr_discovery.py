"""Discovery of the trainers by nnU-Net, in every Python process and without any setup.

``nnunet_cpr.start`` (Python 3.15 and later) and ``nnunet_cpr.pth`` (before) call :func:`register` at
interpreter startup. It appends the folder of trainers to ``nnUNet_extTrainer``, the list of folders that
nnU-Net searches after its own. Only the standard library may be imported here.

Notebooks set the variable after Python has started, which drops our folder. So it is appended once more
when nnU-Net's search is imported.
"""

import os
import sys
from importlib.machinery import PathFinder

FOLDERS = ("nnunet_cpr_trainers", "trainers")
"""Names of the folder of trainers: in an installed wheel, in a checkout."""


def trainer_folder() -> "str | None":
    """Return the folder of trainers next to the package, None if there is none."""
    package = PathFinder.find_spec("nnunet_cpr")  # does not import it
    if package is None or not package.submodule_search_locations:
        return None
    parent = os.path.dirname(os.path.abspath(next(iter(package.submodule_search_locations))))
    folders = (os.path.join(parent, name) for name in FOLDERS)
    return next((f for f in folders if os.path.isfile(os.path.join(f, "nnUNetTrainerCPR.py"))), None)


def is_copy(folder: str) -> bool:
    """Return True for a folder of this package's trainers, of any version and environment.

    The class of a user may have the name of ours, but does not create classes for names with suffixes.
    """
    if os.path.basename(os.path.abspath(folder)) not in FOLDERS:
        return False
    try:
        with open(os.path.join(folder, "nnUNetTrainerCPR.py"), encoding="utf-8", errors="replace") as f:
            return "\n__getattr__ = with_suffixes(nnUNetTrainerCPR)\n" in f.read()
    except OSError:
        return False


def register() -> None:
    """Append the folder of trainers to ``nnUNet_extTrainer``, unless it is listed.

    Other copies of it leave the list, such as that of the environment of a parent process: nnU-Net would
    take their trainers, which may not fit the package of this environment.
    """
    folder = trainer_folder()
    if folder is None:
        return
    folders = [f for f in os.environ.get("nnUNet_extTrainer", "").split(os.pathsep) if f]
    kept = [f for f in dict.fromkeys([*folders, folder]) if f == folder or not is_copy(f)]
    os.environ["nnUNet_extTrainer"] = os.pathsep.join(kept)
    if _BeforeSearch not in sys.meta_path:
        sys.meta_path.insert(0, _BeforeSearch)


class _BeforeSearch:
    """Finder that finds no module, but is asked for nnU-Net's search before it is imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "nnunetv2.utilities.find_objects":
            register()
