from __future__ import annotations

import pytest

from nnunet_cpr.optimizers import kernels


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 2048)
    monkeypatch.setattr(kernels, "BATCH", 3)
