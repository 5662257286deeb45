from __future__ import annotations

import pytest
import torch

import nnunet_cpr
from nnunet_cpr import CPR
from tests.golden.goldens import read_golden
from tests.golden.signatures import PROPERTIES, public_signatures

GOLDEN = read_golden("signatures")


def test_exported_names_are_unchanged() -> None:
    assert sorted(nnunet_cpr.__all__) == GOLDEN["names"]


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "names"])
def test_signature_is_unchanged(name: str) -> None:
    assert public_signatures()[name] == GOLDEN[name]


@pytest.mark.parametrize("name", PROPERTIES["CPR"])
def test_cpr_has_one_value_for_each_matrix(name: str) -> None:
    cpr = CPR(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 4)))
    values = getattr(cpr, name)
    assert len(values) == 2
    assert name != "names" or values == ["0.weight", "2.weight"]


def test_unknown_name_is_not_exported() -> None:
    with pytest.raises(AttributeError, match="SGDPCR"):
        nnunet_cpr.SGDPCR  # noqa: B018
