"""A bound of each kind, so that a new one is in every test of all bounds."""

from nnunet_cpr import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.cpr.bounds import BOUNDS, Bound

SHORT: tuple[Bound, ...] = (
    KappaK(0.01),
    KappaKI0(0.9),
    KappaWS(3),
    KappaIP(2),
    KappaIP(1, ema=0.5),
)
"""They are set within six steps."""

assert {type(bound) for bound in SHORT} == set(BOUNDS.values()), "add the new bound to SHORT"
