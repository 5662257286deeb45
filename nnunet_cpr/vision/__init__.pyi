from .sweep import Sweep, draw_summary, load_sweep, summarize
from .tasks import find_task
from .training import train

__all__ = ["Sweep", "draw_summary", "find_task", "load_sweep", "summarize", "train"]
