from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nnunet_cpr import CPR, SGDCPR
from nnunet_cpr.cpr.regularized_parameters import regularized


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3)
        self.linear = nn.Linear(3, 4)
        self.embedding = nn.Embedding(5, 6)
        self.bag = nn.EmbeddingBag(5, 6)
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(4),
                nn.LayerNorm((2, 3)),
                nn.GroupNorm(1, 4),
                nn.InstanceNorm2d(4, affine=True),
            ]
        )
        self.position = nn.Parameter(torch.zeros(2, 3))
        self.table = nn.Module()
        self.table.bias = nn.Parameter(torch.zeros(2, 3))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def no_weight_decay(self) -> set[str]:
        return {"position"}


def test_matrices_and_kernels_of_a_module() -> None:
    assert list(regularized(Everything())) == ["conv.weight", "linear.weight"]


def test_named_parameters_parameters_and_groups() -> None:
    m = nn.Linear(3, 4)
    assert list(regularized(m.named_parameters())) == ["weight"]
    assert list(regularized(m.parameters())) == ["0"]
    assert list(regularized([{"params": [m.bias]}, {"params": m.weight}])) == ["1.0"]
    assert list(regularized([{"params": m.named_parameters()}])) == ["weight"]


def test_groups_can_be_excluded() -> None:
    a, b = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    assert list(regularized([{"params": [a], "regularize": False}, {"params": [b]}])) == ["1.0"]
    decay = [{"params": [a], "weight_decay": 0.0}, {"params": [b], "weight_decay": 0.1}]
    assert list(regularized(decay)) == ["1.0"]
    # Where no group decays, a 0 says nothing.
    assert (
        len(regularized([{"params": [a], "weight_decay": 0}, {"params": [b], "weight_decay": 0}])) == 2
    )
    # Beside a group that leaves its weight decay to the optimizer it does.
    assert list(regularized([{"params": [a]}, {"params": [b], "weight_decay": 0}])) == ["0.0"]
    # And CPR takes the place of the positive one.
    assert {g["weight_decay"] for g in SGDCPR(decay, lr=0.1).param_groups} == {0}


def test_nothing_to_regularize_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="no parameter to regularize for CPR"):
        assert CPR(nn.BatchNorm2d(3)).names == []
    with pytest.raises(ValueError, match="empty parameter list"):
        CPR([])


def test_invalid_params_are_refused() -> None:
    with pytest.raises(TypeError, match="got a tensor"):
        CPR(torch.zeros(2, 2))
    with pytest.raises(TypeError, match="expected a module, parameters or groups, got <class"):
        CPR(nn.Linear)
    with pytest.raises(TypeError, match="a parameter group: expected parameters, got a module"):
        CPR([{"params": nn.Linear(2, 2)}])
    with pytest.raises(TypeError, match="a parameter group: expected an ordered collection"):
        CPR([{"params": {nn.Parameter(torch.zeros(2, 2))}}])
    with pytest.raises(ValueError, match="expected names for all parameters or none"):
        CPR([("w", nn.Parameter(torch.zeros(2, 2))), nn.Parameter(torch.zeros(2, 2))])
    for decay in (-0.1, None):
        with pytest.raises(ValueError, match="weight_decay of a parameter group: expected a finite"):
            CPR([{"params": [nn.Parameter(torch.zeros(2, 2))], "weight_decay": decay}])
    with pytest.raises(TypeError, match="regularize of a parameter group: expected True"):
        CPR([{"params": [nn.Parameter(torch.zeros(2, 2))], "regularize": "no"}])
    with pytest.raises(TypeError, match="complex"):
        CPR([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="expected unique names, got 'w'"):
        CPR([("w", nn.Parameter(torch.zeros(2, 2))), ("w", nn.Parameter(torch.zeros(2, 2)))])


EITHER = pytest.mark.parametrize("give", [lambda m: m, lambda m: m.named_parameters()])


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.body.weight

    def no_weight_decay(self) -> set[str]:
        return {"tied.weight"}


def test_listed_parameters_are_found_when_tied_or_compiled() -> None:
    model = Listing()
    assert regularized(model) == {}
    model.body = torch.compile(nn.Linear(4, 4), backend="eager")
    model.no_weight_decay = lambda: {"body.weight"}
    assert list(regularized(model)) == ["tied.weight"]


@EITHER
def test_parametrized_embeddings_and_normalizations_are_not_regularized(give: Callable) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 4), "norm": nn.LayerNorm((4, 4))})
    model["linear"] = nn.Linear(4, 4)
    for layer in model.values():
        nn.utils.parametrizations.weight_norm(layer)
    found = {name.partition(".")[0] for name in regularized(give(model))}
    assert found == {"linear"}


@EITHER
def test_embeddings_adapted_by_peft_are_not_regularized(give: Callable[[nn.Module], Any]) -> None:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(9, 4), "place": nn.Embedding(5, 4), "out": nn.Linear(4, 9)}
    )
    config = peft.LoraConfig(
        r=2, target_modules=["place", "out"], trainable_token_indices={"tokens": [1, 2]}
    )
    adapted = peft.get_peft_model(model, config)
    assert {p.shape[0] for p in adapted.parameters() if p.requires_grad} == {2, 4, 9}
    assert [name.split(".")[2:4] for name in regularized(give(adapted))] == [
        ["out", "lora_A"],
        ["out", "lora_B"],
    ]


def test_names_tell_normalizations_and_embeddings_without_a_module() -> None:
    owners = ["norm", "norm1", "ln_f", "input_layernorm", "LayerNorm", "embed_tokens", "wte", "tok_emb"]
    kept = ["linear", "norm1.linear", "patch_embed.proj", "align", "member"]
    named = {f"{owner}.weight": nn.Parameter(torch.randn(3, 4)) for owner in owners + kept}
    assert list(regularized(named.items())) == [f"{owner}.weight" for owner in kept]
    saved = [("model.embed_tokens.modules_to_save.default.weight", nn.Parameter(torch.randn(3, 4)))]
    assert not regularized(saved)
    group = {"params": list(named.items()), "regularize": True}
    assert len(regularized([group])) == len(owners + kept)
    patches = [("patch_embedding.weight", nn.Parameter(torch.randn(3, 4, 2, 2)))]
    assert list(regularized(patches)) == ["patch_embedding.weight"]


# Doubts


def test_names_of_embeddings_or_linear_layers_are_reported() -> None:
    model = nn.ModuleDict({"decoder_embed": nn.Linear(4, 3), "out": nn.Linear(3, 2)})
    with pytest.warns(UserWarning, match="CPR regularizes 'decoder_embed.weight', which may") as caught:
        optimizer = SGDCPR(model.named_parameters())
    assert len(caught) == 1 and optimizer.cpr.names == ["decoder_embed.weight", "out.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SGDCPR(model)
        SGDCPR([{"params": list(model.named_parameters()), "regularize": True}])


def test_stacked_normalizations_are_excluded_by_name_or_reported() -> None:
    layers = [nn.Sequential(OrderedDict(norm=nn.LayerNorm(4), out=nn.Linear(4, 2))) for _ in range(3)]
    params, _ = torch.func.stack_module_state(layers)
    assert list(regularized(params.items())) == ["out.weight"]
    module = nn.ParameterDict({"scales": torch.ones(3, 4)})
    for doubtful, name in ((list(params.values()), "0"), (module, "scales")):
        with pytest.warns(UserWarning, match=f"regularizes '{name}', which may .*all elements are 1"):
            CPR(doubtful)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CPR([nn.Parameter(torch.ones(3, 4))])  # alone and without a name: set by hand
        CPR([{"params": module.named_parameters(), "regularize": True}])
