"""Copy nnU-Net's plans of a data set with a network that a CPU trains: ``nnUNetPlansSmall``.

python benchmarks/real_data/small_plans.py Dataset004_Hippocampus
"""

import json
import os
import sys
from pathlib import Path

folder = Path(os.environ["nnUNet_preprocessed"], sys.argv[1])
plans = json.loads((folder / "nnUNetPlans.json").read_text())
plans["plans_name"] = "nnUNetPlansSmall"
configuration = plans["configurations"]["3d_fullres"]
configuration["batch_size"] = 2
configuration["architecture"]["arch_kwargs"]["features_per_stage"] = [8, 16, 32, 64]
(folder / "nnUNetPlansSmall.json").write_text(json.dumps(plans))
