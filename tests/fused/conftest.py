from __future__ import annotations

import pytest

from nnunet_cpr.fused import cpu


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CHUNK", 2048)
    monkeypatch.setattr(cpu, "BATCH", 3)
