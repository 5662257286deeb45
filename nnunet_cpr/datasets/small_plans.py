"""Plans with a network, patches and batches small enough for a CPU or a first try."""

from __future__ import annotations

import json
import math
from pathlib import Path

from nnunet_cpr.files import atomic_write, read_json
from nnunet_cpr.refusals import Refusal

FEATURES = 8
"""Features of the first stage; each stage has twice those of the one before."""
PATCH = 64
"""Largest length of a patch along an axis, in voxels."""


def write_small_plans(folder: Path, source: str, target: str, patch: int = PATCH) -> list[str]:
    """Copy plans with smaller networks, patches and batches, and return the changed configurations.

    The preprocessed data are those of the source, so nothing is preprocessed again.

    Args:
        folder: folder of the preprocessed data set.
        source, target: identifiers of the plans, which are their file names without ``.json``.
        patch: largest length of a patch, unless the network needs a larger one.

    Raises:
        Refusal: there are no such plans.
    """
    file = folder / f"{source}.json"
    if not file.exists():
        raise Refusal(f"{file}: no such plans", "run nnUNetv2_plan_and_preprocess first")
    plans = read_json(file)
    plans["plans_name"] = target
    changed = []
    for name, configuration in plans["configurations"].items():
        if "architecture" not in configuration:
            continue  # it inherits those of another one
        configuration["batch_size"] = 2
        network = configuration["architecture"]["arch_kwargs"]
        # Its last stage needs two voxels along an axis.
        smallest = [2 * math.prod(strides) for strides in zip(*network["strides"])]
        sizes = zip(configuration["patch_size"], smallest)
        configuration["patch_size"] = [min(n, max(patch, least)) for n, least in sizes]
        network["features_per_stage"] = [FEATURES * 2**i for i in range(network["n_stages"])]
        changed.append(name)
    with atomic_write(folder / f"{target}.json") as path:
        path.write_text(json.dumps(plans, indent=2))
    return changed
