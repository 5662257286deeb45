"""Bounds kappa: documented import of ``cpr/bounds.py``."""

from nnunet_cpr.cpr.bounds import BOUNDS, Bound, KappaIP, KappaK, KappaKI0, KappaWS, as_bound

__all__ = ["BOUNDS", "Bound", "KappaIP", "KappaK", "KappaKI0", "KappaWS", "as_bound"]
