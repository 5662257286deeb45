"""Make a table and a figure of the runs of a recipe for language models.

    python compare_runs.py runs/gpt2s runs/gpt2s-adamw --out gpt2s
    python compare_runs.py runs/mistral-* --before runs/before --out mistral

The table, also written to OUT.csv, has a line for each setting: the number of runs with different seeds,
mean and standard deviation of the perplexity, mean accuracy of the next token and seconds per step.
Where lm_eval has written its results to a folder ``accuracy`` of a run, the accuracy of each task is
added, with ``--before`` as the change in points. OUT.png has the loss on the held-out text over the
steps, and mean square, growth and Lagrange multiplier of three matrices, one line for each run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from language_options import DYNAMICS, SETTINGS

from nnunet_cpr._figures import new_figure

_ROWS = {"measure": "mean square", "growth": "growth per step", "multiplier": "multiplier"}
"""Rows of the figure below the loss."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    add("--before", type=Path, help="folder with lm_eval's accuracy of the model before fine-tuning")
    add("--out", type=Path, default=Path("comparison"), help="path of the files without .csv and .png")
    add("--matrices", nargs="+", help="names of the matrices to draw (default: first, middle, last)")
    args = parser.parse_args(argv)
    for run in args.runs:
        if not (run / SETTINGS).is_file():
            parser.error(f"{run} is not a run: {SETTINGS} is missing")
    return args


def describe_runs(runs: list[Path]) -> pd.DataFrame:
    """Return a row for each run: ``folder``, ``label`` and ``seed``.

    The label has the options that differ between the runs, the seed excluded.
    """
    settings = pd.DataFrame([json.loads((run / SETTINGS).read_text()) for run in runs])
    varied = [
        option for option in settings if option != "seed" and settings[option].nunique(dropna=False) > 1
    ]
    labels = [
        ", ".join(f"{option} {row[option]}" for option in varied if pd.notna(row[option]))
        for _, row in settings.iterrows()
    ]
    return pd.DataFrame(
        {"folder": runs, "label": [label or "all" for label in labels], "seed": settings["seed"]}
    )


def read_accuracy(folder: Path) -> dict[str, float]:
    """Return the accuracy in percent of each task in the newest file that lm_eval has written."""
    files = sorted((folder / "accuracy").rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return {}
    results = json.loads(files[-1].read_text())["results"]
    return {task: 100 * found["acc,none"] for task, found in results.items() if "acc,none" in found}


def tabulate(runs: pd.DataFrame, before: Path | None) -> pd.DataFrame:
    """Return the mean results of each setting over its seeds."""
    start = read_accuracy(before) if before else {}
    if before and not start:
        sys.exit(
            f"--before {before}: no accuracy/**/results_*.json found; run lm_eval with --output_path"
        )
    rows: list[dict[str, Any]] = []
    for folder in runs["folder"]:
        file = folder / "result.json"
        row = json.loads(file.read_text()) if file.exists() else {}
        rows.append(row | {task: v - start.get(task, 0.0) for task, v in read_accuracy(folder).items()})
    table = pd.concat([runs[["label"]], pd.DataFrame(rows, index=runs.index)], axis=1)
    groups = table.groupby("label", sort=False)
    means = groups.mean()
    if "perplexity" in means:
        means.insert(means.columns.get_loc("perplexity") + 1, "std", groups["perplexity"].std())
    means.insert(0, "runs", groups.size())
    return means.drop(columns="loss", errors="ignore")


def read_losses(folder: Path) -> pd.DataFrame:
    """Return ``step`` and ``eval_loss`` of a run's evaluations."""
    file = folder / "trainer_state.json"
    log = json.loads(file.read_text())["log_history"] if file.exists() else []
    rows = [row for row in log if "eval_loss" in row]
    return pd.DataFrame(rows, columns=["step", "eval_loss"]).drop_duplicates("step", keep="last")


def read_dynamics(folder: Path) -> pd.DataFrame:
    """Return the recorded table of a run, with the growth of the mean square per step."""
    table = pd.read_csv(folder / DYNAMICS).drop_duplicates(["step", "parameter"], keep="last")
    by_matrix = table.groupby("parameter")
    table["growth"] = by_matrix["measure"].diff() / by_matrix["step"].diff()
    return table


def draw(runs: pd.DataFrame, file: Path, matrices: list[str] | None) -> None:
    """Draw the losses and the dynamics of the runs that have them."""
    dynamics = {run: read_dynamics(run) for run in runs["folder"] if (run / DYNAMICS).exists()}
    if not dynamics:
        return
    known = list(next(iter(dynamics.values()))["parameter"].unique())
    names = matrices or [known[i] for i in sorted({0, len(known) // 2, len(known) - 1})]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"--matrices {unknown[0]}: no such matrix; choose from {', '.join(known)}")
    with new_figure(file, (3.4 * len(names), 8.5), {"font.size": 9}) as figure:
        top, *below = figure.subfigures(2, 1, height_ratios=[1, 2.6])
        loss = top.subplots()
        panels = below[0].subplots(len(_ROWS), len(names), sharex=True, squeeze=False)
        for number, (folder, label) in enumerate(zip(runs["folder"], runs["label"])):
            colour = f"C{number % 10}"
            evaluations = read_losses(folder)
            loss.plot(evaluations["step"], evaluations["eval_loss"], color=colour, label=label)
            for column, name in enumerate(names):
                table = dynamics.get(folder, pd.DataFrame(columns=["parameter"]))
                table = table[table["parameter"] == name]
                for row, value in enumerate(_ROWS if len(table) else ()):
                    panels[row, column].plot(table["step"], table[value], color=colour)
        for column, name in enumerate(names):
            panels[0, column].set_title(name.removeprefix("transformer."), fontsize=9)
            panels[-1, column].set_xlabel("step")
        for row, title in enumerate(_ROWS.values()):
            panels[row, 0].set_ylabel(title)
        loss.set(xlabel="step", ylabel="loss on held-out text")
        loss.legend()


def main(argv: list[str] | None = None) -> pd.DataFrame:
    """Print and write the table, and draw the figure."""
    args = parse(argv)
    runs = describe_runs(args.runs)
    table = tabulate(runs, args.before)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    print(table.to_string(float_format="{:.4g}".format))
    table.to_csv(args.out.with_suffix(".csv"))
    draw(runs, args.out.with_suffix(".png"), args.matrices)
    print("written:", *sorted(str(f) for f in args.out.parent.glob(f"{args.out.name}.*")))
    return table


if __name__ == "__main__":
    main()
