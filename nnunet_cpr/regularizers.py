"""Regularization functions R: documented import of ``cpr/regularizers.py``."""

from nnunet_cpr.cpr.regularizers import L1, L2, REGULARIZERS, Huber, Regularizer, Std, get_regularizer

__all__ = ["L1", "L2", "REGULARIZERS", "Huber", "Regularizer", "Std", "get_regularizer"]
