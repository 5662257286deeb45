"""Share of pairs of networks of which the one ahead half way has the better Dice at the end.

    python -m benchmarks.published.pseudo_dice FOLDER

FOLDER is that of ``benchmarks.published.unpack``. Half way is epoch 500 of 1,000, and ahead who has
the higher moving average of the pseudo Dice, by which nnU-Net chooses its best checkpoint. The Dice at
the end is the mean of the classes and validation cases of the fold.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

EPOCH = 500


def scores(fold: Path) -> tuple[float, float]:
    """Return the moving average of the pseudo Dice half way, and the Dice at the end."""
    with open(fold / "progress.csv", newline="") as file:
        by_epoch = {int(row["Epoch"]): float(row["ema_fg_dice"]) for row in csv.DictReader(file)}
    summary = json.loads((fold / "validation" / "summary.json").read_text())
    return by_epoch[EPOCH], summary["foreground_mean"]["Dice"]


def agreements(results: Path) -> Iterator[bool]:
    """Yield True or False for each pair of networks on a fold of a data set."""
    folds: dict[tuple[str, str], list[Path]] = {}
    for fold in sorted(results.glob("Dataset*/*/fold_*")):
        folds.setdefault((fold.parts[-3], fold.name), []).append(fold)
    for networks in folds.values():
        for (half_a, end_a), (half_b, end_b) in itertools.combinations(map(scores, networks), 2):
            yield (half_a - half_b) * (end_a - end_b) > 0


def main() -> None:
    """Print the share of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    found = list(agreements(parser.parse_args().folder))
    if not found:
        parser.error("expected the results of benchmarks.published.unpack, found none")
    print(f"ahead at epoch {EPOCH}, better at the end: {sum(found)} of {len(found)} pairs of networks")


if __name__ == "__main__":
    main()
