"""Benchmarks of regularized steps on real shapes, each against a reference.

Run ``python -m benchmarks.step_time`` or ``python -m benchmarks.train_step`` from the repository's root.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler prints each start
