from .summary import draw_summary, summarize
from .sweep import Sweep, load_sweep
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
