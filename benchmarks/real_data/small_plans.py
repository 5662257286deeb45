"""Copy nnU-Net's plans of a data set with a network that a CPU trains.

python benchmarks/real_data/small_plans.py Dataset004_Hippocampus
python benchmarks/real_data/small_plans.py Dataset004_Hippocampus --patch-size 32 40 32
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
parser.add_argument("--patch-size", type=int, nargs="+", help="gives nnUNetPlansSmallPatch")
options = parser.parse_args()

folder = Path(os.environ["nnUNet_preprocessed"], options.dataset)
plans = json.loads((folder / "nnUNetPlans.json").read_text())
plans["plans_name"] = "nnUNetPlansSmallPatch" if options.patch_size else "nnUNetPlansSmall"
configuration = plans["configurations"][options.configuration]
configuration["batch_size"] = options.batch_size
if options.patch_size:
    configuration["patch_size"] = options.patch_size
network = configuration["architecture"]["arch_kwargs"]
network["features_per_stage"] = [min(8 * 2**stage, 64) for stage in range(network["n_stages"])]
(folder / f"{plans['plans_name']}.json").write_text(json.dumps(plans))
