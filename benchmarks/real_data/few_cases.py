"""Add folds with few training cases to the splits of a preprocessed data set.

    python benchmarks/real_data/few_cases.py Dataset004_Hippocampus

Needs the splits that the first training or ``nnunet-cpr study run`` with five folds writes.
Folds 100, 101 and 102 have the validation cases of folds 0, 1 and 2 and 10 of their training cases,
folds 200 to 202 have 20, and folds 400 to 402 have 40. The same cases are drawn every time, and the
smaller subsets are part of the larger ones. nnU-Net takes a fold's number as its position in
``splits_final.json``; positions in between repeat fold 0.
"""

import argparse
import json
import os
import random
from pathlib import Path

SIZES = (10, 20, 40)
FOLDS = (0, 1, 2)

parser = argparse.ArgumentParser(description="Add folds with few training cases.")
parser.add_argument("dataset", help="name of the data set")
options = parser.parse_args()

file = Path(os.environ["nnUNet_preprocessed"], options.dataset, "splits_final.json")
splits = json.loads(file.read_text())[:5]
splits += [splits[0]] * (10 * max(SIZES) + len(FOLDS) - len(splits))
for fold in FOLDS:
    cases = sorted(splits[fold]["train"])
    random.Random(fold).shuffle(cases)
    if len(cases) < max(SIZES):
        parser.error(f"{file}: expected at least {max(SIZES)} training cases, got {len(cases)}")
    for size in SIZES:
        splits[10 * size + fold] = {"train": sorted(cases[:size]), "val": splits[fold]["val"]}
file.write_text(json.dumps(splits))
