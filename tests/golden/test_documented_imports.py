from __future__ import annotations

import pytest

from tests.golden.documented_imports import documented_imports, resolve
from tests.golden.goldens import read_golden


@pytest.mark.parametrize("name", sorted({*read_golden("documented_imports"), *documented_imports()}))
def test_documented_name_can_be_imported(name: str) -> None:
    resolve(name)
