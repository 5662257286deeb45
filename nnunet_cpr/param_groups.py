"""Selection of the regularized parameters: documented import of ``cpr/regularized_parameters.py``."""

from nnunet_cpr.cpr.regularized_parameters import ParamGroups, param_groups, regularized

__all__ = ["ParamGroups", "param_groups", "regularized"]
