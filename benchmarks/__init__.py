"""Benchmarks of regularized steps on real shapes, each against a reference.

README.md lists them by the question that each answers.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler prints each start
