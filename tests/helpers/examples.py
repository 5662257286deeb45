"""Number of hypothesis examples: few fixed ones by default, many random ones before a release."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.helpers import ROOT

DEFAULT, SEARCH = "nnunet-cpr", "nnunet-cpr-search"
_EXAMPLES_THAT_FAILED = ROOT / ".hypothesis" / "examples"
_COMMON = settings(
    deadline=None,
    print_blob=True,
    # How long examples take depends on the machine. Fixtures are not changed by the tests that use them.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def register_profiles() -> None:
    """Register a profile for the default run and one for the random search."""
    settings.register_profile(DEFAULT, settings(_COMMON, derandomize=True, database=None))
    database = DirectoryBasedExampleDatabase(_EXAMPLES_THAT_FAILED)
    settings.register_profile(SEARCH, settings(_COMMON, derandomize=False, database=database))


def is_search() -> bool:
    """Return True if the examples of this run are random."""
    return not settings.default.derandomize


def examples(default: int, search: int) -> settings:
    """Return settings with the number of examples of the default run or of the random search."""
    return settings(max_examples=search if is_search() else default)
