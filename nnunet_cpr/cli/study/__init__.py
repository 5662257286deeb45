"""``nnunet-cpr study``: cross-validation studies."""

import typer

from nnunet_cpr.cli.errors import report_errors
from nnunet_cpr.cli.options import expand_options
from nnunet_cpr.cli.study.options import STOPPED
from nnunet_cpr.cli.study.plan import plan
from nnunet_cpr.cli.study.presets import list_studies, new, presets, schema
from nnunet_cpr.cli.study.report_and_predict import predict, report
from nnunet_cpr.cli.study.run import commands, run, run_one
from nnunet_cpr.cli.study.status import cancel, remove, status, stop

app = typer.Typer(
    no_args_is_help=True,
    help="Compare trainers by cross-validation: run the trainings, watch them, report the results.",
)
for training in (run, run_one):
    app.command()(expand_options(report_errors(STOPPED)(training)))
app.command()(expand_options(report_errors("stopped watching; training runs go on")(status)))
again = "stopped; run the same command again to continue"
app.command()(expand_options(report_errors(again)(predict)))
for with_options in (plan, commands, report):
    app.command()(expand_options(report_errors()(with_options)))
app.command("list")(report_errors()(list_studies))
for simple in (presets, new, schema, stop, cancel, remove):
    app.command()(report_errors()(simple))
