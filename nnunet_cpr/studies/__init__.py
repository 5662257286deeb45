"""Cross-validation studies: definition, execution on this machine or on Slurm, and state.

The names in the stub beside this file are those that the commands use. They are imported when they are
first used, so that the help of a command waits for none of them.
"""

import lazy_loader

from nnunet_cpr.environment import check_installed

check_installed(__name__)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
