"""Seeds for the global random number generators."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(*entropy: int) -> None:
    """Seed the global generators of Python, NumPy and torch.

    Args:
        entropy: numbers that together identify the random stream, such as a run's seed and an epoch.

    Example:
        >>> seed_all(1, 0)
        >>> first = random.random()
        >>> seed_all(1, 0)
        >>> first == random.random()
        True
    """
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
