from .cpr.algorithm import CPR
from .cpr.bounds import KappaIP, KappaK, KappaKI0, KappaWS
from .optimizers import SGDCPR, AdamCPR, MuonCPR

__all__ = ["CPR", "SGDCPR", "AdamCPR", "KappaIP", "KappaK", "KappaKI0", "KappaWS", "MuonCPR"]

__version__: str
