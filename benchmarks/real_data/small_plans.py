"""Copy nnU-Net's plans of a data set with a network that a CPU trains: ``nnUNetPlansSmall``.

python benchmarks/real_data/small_plans.py Dataset004_Hippocampus
python benchmarks/real_data/small_plans.py Dataset027_ACDC 2d --batch-size 8
"""

import argparse
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser(description="Write plans with a small network.")
parser.add_argument("dataset", help="name of the data set")
parser.add_argument("configuration", nargs="?", default="3d_fullres", help="configuration to change")
parser.add_argument("--batch-size", type=int, default=2)
options = parser.parse_args()

folder = Path(os.environ["nnUNet_preprocessed"], options.dataset)
plans = json.loads((folder / "nnUNetPlans.json").read_text())
plans["plans_name"] = "nnUNetPlansSmall"
configuration = plans["configurations"][options.configuration]
configuration["batch_size"] = options.batch_size
network = configuration["architecture"]["arch_kwargs"]
network["features_per_stage"] = [min(8 * 2**stage, 64) for stage in range(network["n_stages"])]
(folder / "nnUNetPlansSmall.json").write_text(json.dumps(plans))
