"""How fast a regularized step is, measured side by side on real shapes.

``python -m benchmarks.step_time`` and ``python -m benchmarks.train_step``, from the repository's root.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints each start otherwise
