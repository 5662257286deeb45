"""Preview of ``nnunet-cpr study run`` that changes no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nnunet_cpr.studies.definition import Study
from nnunet_cpr.studies.estimates import iteration_seconds, steps_left, time_left
from nnunet_cpr.studies.preparation import Step
from nnunet_cpr.studies.run_state import StudyPaths
from nnunet_cpr.studies.status_table import states, summary


def dry_run_lines(study: Study, paths: StudyPaths, steps: Sequence[Step], jobs: int) -> Iterator[str]:
    """Yield the commands that a study would run, and how much is left to train.

    Args:
        study: a study that :func:`~nnunet_cpr.studies.preparation.check_study_data` accepts.
        paths: the study's folders.
        steps: the commands that prepare the data sets.
        jobs: number of runs that are trained at the same time.
    """
    for step in steps:
        yield f"first: {' '.join(step.command)}"
    found = states(study, paths)
    for run, state in found.items():
        epochs = "?" if state.epochs is None else state.epochs
        command = f"nnUNetv2_train {run.dataset} {run.configuration} {run.fold}"
        command = f"{command} -tr {run.trainer} -p {run.plans}"
        yield f"{command}: {state.stage.value}, epoch {state.epoch} of {epochs}"
    training_steps, unknown = steps_left(found)
    without = f", without {unknown} runs whose number of epochs is unknown" if unknown else ""
    yield f"{summary(found.values())}; {training_steps:,} training steps left{without}"
    left = time_left(found, jobs, iteration_seconds(study, paths.results))
    if left.seconds:
        yield f"{left} ({jobs} run{'s' if jobs > 1 else ''} at a time, validation not included)"
