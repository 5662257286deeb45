from .dynamics_figure import draw_dynamics
from .engine import train
from .folder import DYNAMICS, run_folder
from .heatmaps import draw_sweep
from .learning_curves import draw_curves
from .selection import compare_methods
from .sweeps import SWEEPS, Sweep
from .task import CannotDraw, CannotTrain, Diverged, InUse, Options, Task
from .tasks import TASKS

__all__ = [
    "DYNAMICS",
    "SWEEPS",
    "TASKS",
    "CannotDraw",
    "CannotTrain",
    "Diverged",
    "InUse",
    "Options",
    "Sweep",
    "Task",
    "compare_methods",
    "draw_curves",
    "draw_dynamics",
    "draw_sweep",
    "run_folder",
    "train",
]
