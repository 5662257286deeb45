"""Coverage-guided fuzzing of state dicts: ``python -m tests.fuzz.fuzz_state_dict -runs=10000``."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["nnunet_cpr._state_dict", "nnunet_cpr._attachment"]):
    from tests.helpers.promises import Loading

loading = Loading()


def one_input(data: bytes) -> None:
    """Load a state with invalid values in one or two places."""
    given = atheris.FuzzedDataProvider(data)
    loading.is_taken_or_refused(lambda n: given.ConsumeIntInRange(0, n - 1))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
