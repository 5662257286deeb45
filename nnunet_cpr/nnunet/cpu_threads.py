"""Number of threads of a training on the CPU."""

from __future__ import annotations

import os

from nnunet_cpr._validation import positive_integer

CPU_THREADS = "NNUNET_CPR_CPU_THREADS"
"""Environment variable with the number of threads of a training on the CPU."""


def limit_cpu_threads() -> None:
    """Let torch use the number of threads in the environment variable; without it, change nothing.

    ``nnUNetv2_train -device cpu`` uses as many threads as the machine has cores, whatever
    ``OMP_NUM_THREADS`` says. Trainings side by side then wait for each other.

    Raises:
        ValueError: the environment variable has a wrong value.
    """
    import torch  # studies need the name of the variable only

    value = os.environ.get(CPU_THREADS)
    if value:
        torch.set_num_threads(positive_integer(CPU_THREADS, int(value) if value.isdecimal() else value))
