from .algorithm import CPR

__all__ = ["CPR"]
