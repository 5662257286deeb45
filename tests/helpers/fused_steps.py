"""Record of the steps that kernels take."""

from __future__ import annotations

from typing import Any

import pytest

from nnunet_cpr.optimizers.fused_step import FusedStep, find_kernel


def record_fused_steps(patch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets True for each step a kernel takes from now on, False for others."""
    outcomes: list[bool] = []

    def find(device: Any) -> Any:
        kernel = find_kernel(device)

        def record(*arguments: Any) -> bool:
            outcomes.append(kernel is not None and kernel(*arguments))
            return outcomes[-1]

        return record

    patch.setattr(FusedStep, "_find_kernel", staticmethod(find))
    return outcomes
