"""Worker process that resumes trainings from checkpoints and saves their final states.

It reads one request in a line, JSON, and answers each with a line: nothing, or what went wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.helpers.resume_cases import Case, Training, small_chunks


def serve(request: dict) -> None:
    training = Training(Case(**request["case"]), seed=77)  # other weights, which loading replaces
    training.load(Path(request["checkpoint"]), **request["options"])
    if request["again_at"] is not None:  # and is interrupted once more
        training.run(request["begin"], request["again_at"])
        # To another file: with mmap a torch optimizer's state still lies in the first one.
        training.save(Path(request["result"]))
        training = Training(training.case, seed=78)
        training.load(Path(request["result"]))
        request["begin"] = request["again_at"]
    training.run(request["begin"])
    torch.save(training.state(), request["result"])


if __name__ == "__main__":
    small_chunks()
    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            serve(json.loads(line))
            answer = ""
        except Exception as error:  # the test fails with it
            answer = " ".join(f"{type(error).__name__}: {error}".split())
        print(answer, flush=True)
