"""Constrained Parameter Regularization (CPR) for any torch optimizer: the core.

``algorithm.py`` is the paper's Algorithm 1, ``attachment.py`` what calls it before each step of an
optimizer; ``bounds.py`` has kappa, ``regularizers.py`` R, and ``regularized_parameters.py`` the choice
of the parameter matrices. The name in the stub beside this file is imported when it is first used: names
of trainers contain bounds, and are read without importing torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
