"""Write the published trainings of three networks as nnU-Net's results.

    git clone https://github.com/automl/AutoNNUnet
    python -m benchmarks.published.unpack AutoNNUnet/results_zipped FOLDER

They are the baselines of Auto-nnU-Net (Becktepe et al., 2025; BSD 3-Clause): nnU-Net's default network
and its residual encoders M and L on the ten data sets of the Medical Segmentation Decathlon, 1,000
epochs, one training of each of five folds. An archive has ``DATASET/CONFIGURATION/fold_N``; nnU-Net's
name of the folder in between has trainer and plans, too.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path, PurePosixPath

PLANS = {
    "ConvolutionalEncoder": "nnUNetPlans",
    "ResidualEncoderM": "nnUNetResEncUNetMPlans",
    "ResidualEncoderL": "nnUNetResEncUNetLPlans",
}
"""Plans of each network, by the name in the folder of its archives."""
FILES = ("summary.json", "dataset.json", "progress.csv")


def unpack(archive: Path, plans: str, results: Path) -> None:
    """Write the metrics and the pseudo Dice of the trainings in an archive.

    Args:
        archive: results of a network on a data set, a ZIP file.
        plans: name of the plans.
        results: folder to write, for ``nnUNet_results``.
    """
    with zipfile.ZipFile(archive) as contents:
        for name in contents.namelist():
            path = PurePosixPath(name)
            if path.name in FILES:
                dataset, configuration, *inside = path.parts
                target = results / dataset / f"nnUNetTrainer__{plans}__{configuration}" / Path(*inside)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(contents.read(name))


def main() -> None:
    """Unpack the archives of all networks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archives", type=Path, help="folder results_zipped of AutoNNUnet")
    parser.add_argument("results", type=Path, help="folder to write, for nnUNet_results")
    options = parser.parse_args()
    for network, plans in PLANS.items():
        archives = sorted((options.archives / f"baseline_{network}").glob("*.zip"))
        if not archives:
            parser.error(f"{options.archives}: expected ZIP files in baseline_{network}, found none")
        for archive in archives:
            unpack(archive, plans, options.results)


if __name__ == "__main__":
    main()
