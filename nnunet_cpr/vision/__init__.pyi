from .sweep import Sweep, draw_summary, load_sweep, summarize
from .task import CannotTrain, Diverged, InUse
from .tasks import find_task
from .training import train

__all__ = [
    "CannotTrain",
    "Diverged",
    "InUse",
    "Sweep",
    "draw_summary",
    "find_task",
    "load_sweep",
    "summarize",
    "train",
]
