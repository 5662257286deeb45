"""Constrained Parameter Regularization for nnU-Net and for any PyTorch training loop.

The names in the stub beside this file are imported when they are first used, so that
``nnunet-cpr --help`` need not wait for torch.
"""

import lazy_loader

__version__ = "0.3.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
