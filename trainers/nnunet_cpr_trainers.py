"""The trainers of nnunet-cpr, where nnU-Net's search for a trainer's name finds them.

nnU-Net imports every module in this folder for every name that is not its own, so this one imports
nothing before it is asked for a name that could be ours.
"""

import sys


def __getattr__(name):
    if not name.lower().startswith("nnunettrainer"):
        raise AttributeError(name)
    from nnunet_cpr.naming import WrongName
    from nnunet_cpr.nnunet.trainer import trainer_class

    try:
        found = trainer_class(name)
    except WrongName as error:
        print(f"nnunet-cpr: {error}", file=sys.stderr)
        found = None
    if found is None:
        # A later folder may hold somebody's own trainer of that name.
        raise AttributeError(name)
    return found
