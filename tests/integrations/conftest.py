from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integrations.optimizer_infos import CPROptimizerInfo


@pytest.fixture(params=["AdamCPR", "SGDCPR"])
def info(request: pytest.FixtureRequest) -> CPROptimizerInfo:
    # Torch's test utilities import two thousand modules; no other test should wait for them.
    from tests.integrations.optimizer_infos import optimizer_infos

    return next(info for info in optimizer_infos if info.name == request.param)
