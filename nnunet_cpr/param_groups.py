"""Selection of the regularized parameters, by the documented import; see ``cpr/parameters.py``."""

from nnunet_cpr.cpr.parameters import ParamGroups, param_groups, regularized

__all__ = ["ParamGroups", "param_groups", "regularized"]
