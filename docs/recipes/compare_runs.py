"""Make a table and a figure of the runs of a recipe for language models.

    python compare_runs.py runs/gpt2s runs/gpt2s-adamw --out gpt2s
    python compare_runs.py runs/mistral-* --before runs/before --out mistral

The table, also written to OUT.csv, has a line for each setting: the number of runs with different seeds,
mean and standard deviation of perplexity and accuracy of the next token, and the median time of a step.
Where lm_eval has written its results to a folder ``accuracy`` of a run, the accuracy of each task is
added in percent, with ``--before`` as the change in points. A cell is empty if one of its runs has no
value. OUT.png has the losses over the steps, dashed in training and solid on the held-out text, and mean
square, growth and Lagrange multiplier of three matrices, one line for each run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from language_options import DYNAMICS, SETTINGS
from matplotlib import colormaps

from nnunet_cpr.figures import new_figure

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
    if args.out.is_dir():
        parser.error(f"--out {args.out} is a folder; add a name for the files in it")
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
    found = pd.DataFrame(
        {"folder": runs, "label": [label or "all" for label in labels], "seed": settings["seed"]}
    )
    twice = found[found.duplicated(["label", "seed"])]
    if len(twice):
        sys.exit(
            f"{twice['folder'].iloc[0]} has the options and the seed of another run; give one of them"
        )
    return found


def read_accuracy(folder: Path) -> dict[str, float]:
    """Return the accuracy in percent of each task that lm_eval has measured; the last one counts."""
    files = sorted((folder / "accuracy").rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    tasks: dict[str, dict[str, float]] = {}
    for file in files:
        tasks |= json.loads(file.read_text())["results"]
    return {task: 100 * found["acc,none"] for task, found in tasks.items() if "acc,none" in found}


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
        measured = read_accuracy(folder)
        if before:
            measured = {task: value - start[task] for task, value in measured.items() if task in start}
        rows.append(row | measured)
    table = pd.concat([runs[["label"]], pd.DataFrame(rows, index=runs.index)], axis=1)
    table = table.drop(columns="loss", errors="ignore")
    groups = table.groupby("label", sort=False)
    means = groups.agg(lambda values: values.mean(skipna=False))
    for column in means.columns.drop("seconds_per_step", errors="ignore"):
        means.insert(means.columns.get_loc(column) + 1, f"{column} std", groups[column].std())
    means.insert(0, "runs", groups.size())
    return means


def read_losses(folder: Path) -> pd.DataFrame:
    """Return ``step``, and ``loss`` or ``eval_loss`` where they were logged."""
    file = folder / "trainer_state.json"
    log = json.loads(file.read_text())["log_history"] if file.exists() else []
    return pd.DataFrame(log, columns=["step", "loss", "eval_loss"])


def read_dynamics(folder: Path) -> pd.DataFrame:
    """Return the recorded table of a run, with the growth of the mean square per step."""
    table = pd.read_csv(folder / DYNAMICS).drop_duplicates(["step", "parameter"], keep="last")
    by_matrix = table.groupby("parameter")
    table["growth"] = by_matrix["measure"].diff() / by_matrix["step"].diff()
    return table


def draw(runs: pd.DataFrame, file: Path, matrices: list[str] | None) -> bool:
    """Draw the losses and the dynamics of the runs, and return False if none has any."""
    dynamics = {run: read_dynamics(run) for run in runs["folder"] if (run / DYNAMICS).exists()}
    dynamics = {run: table for run, table in dynamics.items() if len(table)}
    if not dynamics:
        return False
    known = list(next(iter(dynamics.values()))["parameter"].unique())
    names = matrices or [known[i] for i in sorted({0, len(known) // 2, len(known) - 1})]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"--matrices {unknown[0]}: no such matrix; choose from {', '.join(known)}")
    with new_figure(file, (3.4 * len(names), 8.5), {"font.size": 9}) as figure:
        top, *below = figure.subfigures(2, 1, height_ratios=[1, 2.6])
        loss = top.subplots()
        panels = below[0].subplots(len(_ROWS), len(names), sharex=True, squeeze=False)
        labels = list(runs["label"].unique())
        colours = colormaps["turbo"].resampled(len(labels)) if len(labels) > 10 else colormaps["tab10"]
        for folder, label in zip(runs["folder"], runs["label"]):
            colour = colours(labels.index(label))
            losses = read_losses(folder).set_index("step")
            loss.plot(losses["loss"].dropna(), "--", color=colour, linewidth=0.8)
            is_first = folder == runs["folder"][runs["label"] == label].iloc[0]
            own = label if is_first else None  # seeds share a line of the legend
            loss.plot(losses["eval_loss"].dropna(), color=colour, label=own)
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
        loss.set(xlabel="step", ylabel="loss")
        loss.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return True


def main(argv: list[str] | None = None) -> pd.DataFrame:
    """Print and write the table, and draw the figure."""
    args = parse(argv)
    runs = describe_runs(args.runs)
    table = tabulate(runs, args.before)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    print(table.to_string(float_format="{:.4g}".format))
    table_file, figure = (args.out.with_name(f"{args.out.name}.{kind}") for kind in ("csv", "png"))
    table.to_csv(table_file)
    print("written:", table_file, *([figure] if draw(runs, figure, args.matrices) else []))
    return table


if __name__ == "__main__":
    main()
