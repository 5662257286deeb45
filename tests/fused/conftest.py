from __future__ import annotations

import importlib

import pytest

from nnunet_cpr.fused import cpu


@pytest.fixture(params=["cpu", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "CHUNK", 2048)
    if request.param == "triton":
        pytest.importorskip("triton", minversion="3.3")
        triton = importlib.import_module("nnunet_cpr.fused.triton")
        monkeypatch.setattr(triton, "CHUNK", 2048)
    return request.param
