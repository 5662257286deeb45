"""``nnunet-cpr study``: cross-validation studies."""

from collections.abc import Callable

import typer

from nnunet_cpr.cli._options import expand_settings
from nnunet_cpr.cli.study._options import STOPPED, study_errors
from nnunet_cpr.cli.study.presets import list_studies, new, presets, schema
from nnunet_cpr.cli.study.report import report
from nnunet_cpr.cli.study.run import commands, run, run_one
from nnunet_cpr.cli.study.status import cancel, remove, status, stop

app = typer.Typer(
    no_args_is_help=True,
    help="Compare trainers by cross-validation: run the trainings, watch them, report the results.",
)


def _add(command: Callable[..., None], name: str | None = None) -> None:
    interrupted = {run: STOPPED, run_one: STOPPED, status: "stopped watching; training runs go on"}
    app.command(name)(expand_settings(study_errors(interrupted.get(command, "stopped"))(command)))


_add(presets)
_add(list_studies, "list")
for each in (new, schema, run, commands, run_one, status, report, stop, cancel, remove):
    _add(each)
