"""Report of a cross-validation study: results, comparisons, tables, figures and a page."""

import lazy_loader

from nnunet_cpr.environment import check_installed

check_installed(__name__)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
