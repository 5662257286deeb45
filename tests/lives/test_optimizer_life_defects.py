"""Defects that the state machine of an optimizer's life must find when they are put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks

from nnunet_cpr import CPR
from nnunet_cpr.cpr import attachment, saved_state
from nnunet_cpr.cpr.attachment import attached_method
from nnunet_cpr.cpr.regularizers import L2
from nnunet_cpr.optimizers import groups, muon
from tests.lives.test_optimizer_life import play

pytestmark = pytest.mark.release

Patch = pytest.MonkeyPatch


def step_within_a_step_regularizes_again(patch: Patch) -> None:
    """0.2.0: a subclass whose step calls that of its base, after both classes have been used."""
    patch.setattr(attachment, "is_within_step", lambda optimizer: False)
    # A correction that is open would keep the inner step from another one.
    never = property(lambda method: False, lambda method, value: None)
    patch.setattr(attachment.Attachment, "has_open_correction", never, raising=False)


def momenta_go_by_position(patch: Patch) -> None:
    """0.2.0: multipliers by name, momenta by the order of the parameters."""
    for module in (groups, saved_state):
        patch.setattr(module, "order_by_names", lambda own, saved: saved)


def multipliers_are_loaded_by_position(patch: Patch) -> None:
    def validated(problem: str, saved: Any, own: Any) -> dict[str, Tensor]:
        tensors = compute(problem, saved, own)
        key = "lagrange_multiplier"
        return {**tensors, key: saved["state"][key].clone()}

    compute = saved_state._validated_tensors
    patch.setattr(saved_state, "_validated_tensors", validated)


def mu_of_the_first_group_is_that_of_all(patch: Patch) -> None:
    build = CPR.__init__

    def init(self: CPR, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        for own in self.settings:
            object.__setattr__(own, "mu", self.settings[0].mu)
        self._mu[:] = self._mu[0]

    patch.setattr(CPR, "__init__", init)


def skipped_steps_count(patch: Patch) -> None:
    update = CPR._update

    def count(self: CPR, found_inf: Tensor | None) -> Any:
        step = self._state["step"].clone()
        updated = update(self, found_inf)
        self._state["step"].copy_(step + 1)
        return updated

    patch.setattr(CPR, "_update", count)


def maximize_of_a_group_is_ignored(patch: Patch) -> None:
    patch.setattr(muon, "_TORCHS_OPTIONS", ())


def sums_are_kept_for_the_next_step(patch: Patch) -> None:
    """0.2.0: R of the step before, unless torch's version counter shows a write."""
    kept: dict[int, tuple[int, Tensor]] = {}
    compute = L2.sums

    def sums(self: L2, params: list[Tensor]) -> Tensor:
        before = [kept.get(id(p), (-1, None)) for p in params]
        if [version for version, _ in before] == [p._version for p in params]:
            return torch.stack([own for _, own in before])[None]
        return compute(self, params)

    def keep(optimizer: Any, *_: Any) -> None:
        method = attached_method(optimizer)
        for p in [] if method is None else method.parameters:
            kept[id(p)] = p._version, compute(L2(), [p])[0, 0]

    patch.setattr(L2, "sums", sums)
    patch.setitem(_global_optimizer_post_hooks, 0, keep)


@pytest.mark.parametrize(
    ("put_back", "kind"),
    [
        (step_within_a_step_regularizes_again, "SGD subclass"),
        (momenta_go_by_position, "SGDCPR unfused"),
        (multipliers_are_loaded_by_position, "SGDCPR"),
        (mu_of_the_first_group_is_that_of_all, "AdamCPR unfused"),
        (skipped_steps_count, "SGDCPR scaled"),
        (maximize_of_a_group_is_ignored, "Muon"),
        (sums_are_kept_for_the_next_step, "AdamCPR unfused"),
    ],
)
def test_state_machine_finds_the_defect(put_back: Callable[[Patch], None], kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        put_back(patch)
        with pytest.raises((AssertionError, ValueError, RuntimeError)):
            play(kind, 1000, 1000, phases=[Phase.generate], report_multiple_bugs=False)
