"""Muon and MuonCPR: the rule of each parameter, and their steps against the oracle."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import timm
import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet
from torch import nn

from nnunet_cpr import CPR, AdamCPR, KappaKI0, MuonCPR
from nnunet_cpr.cpr.regularized_parameters import regularized
from nnunet_cpr.optimizers import Muon, muon_rules
from nnunet_cpr.optimizers.muon_rules import kinds
from tests.helpers.matrices import set_gradients
from tests.helpers.oracle import OracleAdam, OracleCPR, OracleMuon

SHAPES = {
    **{"conv": (8, 4, 3, 3), "linear": (5, 12), "long": (9, 5), "up": (6, 4, 2, 2)},
    **{"tall": (12, 3), "bias": (8,)},
}
STEPS = 25
LR, MOMENTUM, BETAS = 0.02, 0.9, (0.8, 0.9)


class Net(nn.Module):
    """Network with a matrix of every kind and a twin of the hidden convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.seg_layers = nn.ModuleList(nn.Conv2d(6, 4, 1) for _ in range(2))


def rules(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the rules of the regularized parameters by name, without ``.weight``."""
    by_id = {
        id(p): rule
        for group in optimizer.param_groups
        for p, rule in zip(group["params"], group["rules"])
    }
    matrices = regularized(model)
    assert {by_id[id(p)] for p in model.parameters() if p.ndim < 2} <= {"adamw"}
    return {name.removesuffix(".weight"): by_id[id(p)] for name, p in matrices.items()}


# Rule of each parameter


def test_kinds_follow_the_rule_that_is_chosen_for_them() -> None:
    model, build = Net(), MuonCPR
    usual = {
        **{"first": "adamw", "hidden.0": "muon", "hidden.1": "muon", "depthwise": "adamw"},
        **{"up": "muon_transposed", "seg_layers.0": "adamw", "seg_layers.1": "adamw"},
    }
    assert rules(model, build(model)) == usual
    assert rules(model, build(nn.DataParallel(model))) == usual
    every = rules(model, build(model, adamw_for=()))
    assert every == {name: "muon_transposed" if name == "up" else "muon" for name in usual}
    alone = rules(model, build(model, adamw_for=["head"]))
    assert {name for name, rule in alone.items() if rule == "adamw"} == {"seg_layers.0", "seg_layers.1"}


def test_group_chooses_its_own_kinds_or_its_rule() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    groups = [
        {"params": [model[0].weight], "adamw_for": ()},
        {"params": [model[1].weight], "use_muon": False},
        {"params": [model[2].weight]},
    ]
    found = [group["rules"] for group in MuonCPR(groups, model=model).param_groups]
    assert found == [["muon"], ["adamw"], ["adamw"]]


def test_no_layer_takes_the_place_of_one_that_is_not_regularized() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[0].requires_grad_(False)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = kinds(model)
    assert {n: found[id(p)] for n, p in trained.items() if id(p) in found} == {
        "1.weight": set(),
        "2.weight": set(),
        "3.weight": {"head"},
    }
    tied = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False))
    tied[2].weight = tied[0].weight
    assert list(kinds(tied).values()) == [set()], "neither the first nor the last layer"
    bare = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0)
    assert not any("head" in found for found in kinds(bare).values())


def test_kinds_of_nnunets_network_are_found() -> None:
    model = PlainConvUNet(
        **{"input_channels": 1, "n_stages": 3, "features_per_stage": 8, "conv_op": nn.Conv3d},
        **{"kernel_sizes": 3, "strides": [1, 2, 2], "n_conv_per_stage": 2, "num_classes": 3},
        **{"n_conv_per_stage_decoder": 2, "conv_bias": True, "deep_supervision": True},
        **{"norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True}, "nonlin": nn.ReLU},
    )
    found = rules(model, Muon(model))
    of = {rule: {n for n, own in found.items() if own == rule} for rule in set(found.values())}
    heads = {f"decoder.seg_layers.{i}" for i in range(2)}
    assert of["adamw"] == {"encoder.stages.0.0.convs.0.conv", *heads}
    assert of["muon_transposed"] == {f"decoder.transpconvs.{i}" for i in range(2)}
    assert len(of["muon"]) == 9


def test_classifier_and_embeddings_of_timm_models_follow_adamw() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=2)
    optimizer = Muon(model)
    found = rules(model, optimizer)
    assert {name for name, rule in found.items() if rule == "adamw"} == {"patch_embed.proj", "head"}
    listed = dict(zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["rules"]))
    assert listed["pos_embed"] == listed["cls_token"] == "adamw"


def test_vectors_and_single_rows_follow_adamw() -> None:
    params = [nn.Parameter(torch.randn(*shape)) for shape in ((1, 7), (7, 1, 1), (7,), (2, 7))]
    assert Muon(params).param_groups[0]["rules"] == ["adamw", "adamw", "adamw", "muon"]
    with pytest.warns(UserWarning, match="params: no parameter to orthogonalize for Muon"):
        Muon(params[:3])


def test_group_that_is_added_later_is_stepped() -> None:
    optimizer = Muon([nn.Parameter(torch.ones(3, 3))])
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4))]})
    assert optimizer.param_groups[1]["rules"] == ["muon", "adamw"]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    set_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(params, before))


@pytest.mark.parametrize("build", [Muon, MuonCPR])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_rules_follow_parameters_that_are_dropped_or_moved(build: type, steps_before: int) -> None:
    net = Net()
    optimizer = build(net, lr=0.01)
    (group,) = optimizer.param_groups
    whole = {id(p): rule for p, rule in zip(group["params"], group["rules"])}
    set_gradients(list(net.parameters()), 0)
    for _ in range(steps_before):
        optimizer.step()
    dropped = {id(net.first.bias), id(net.norm.weight), id(net.norm.bias)}
    group["params"] = [p for p in group["params"] if id(p) not in dropped]
    if build is Muon:  # CPR refuses another order
        group["params"].reverse()
    optimizer.step()
    assert group["rules"] == [whole[id(p)] for p in group["params"]]
    for p, rule in zip(group["params"], group["rules"]):
        assert ("exp_avg" in optimizer.state[p]) == (rule == "adamw")


@pytest.mark.parametrize("build", [Muon, MuonCPR, AdamCPR])
def test_parameter_that_is_appended_to_a_group_is_stepped(build: type) -> None:
    net = Net()
    optimizer = build(net.hidden, lr=0.01, **({} if build is AdamCPR else {"model": net}))
    late = [net.first.weight, nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(3))]
    optimizer.param_groups[0]["params"] += late
    set_gradients([*net.parameters(), *late[1:]], 0)
    before = [p.detach().clone() for p in late]
    optimizer.step()
    assert not any(map(torch.equal, late, before))
    if build is not AdamCPR:
        assert optimizer.param_groups[0]["rules"][-3:] == ["adamw", "muon", "adamw"]


def test_rules_that_are_set_with_the_parameters_hold() -> None:
    params = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    optimizer = Muon(params, lr=0.01)
    (group,) = optimizer.param_groups
    group["params"], group["rules"] = params[1:], ["adamw", "muon"]
    set_gradients(params, 0)
    optimizer.step()
    assert group["rules"] == ["adamw", "muon"]
    assert "exp_avg" in optimizer.state[params[1]] and "momentum_buffer" in optimizer.state[params[2]]
    group["rules"] = ["muon"]
    with pytest.raises(ValueError, match="a rule for each of 2 parameters, got 1; change rules"):
        optimizer.step()


def test_copy_refuses_groups_whose_rules_are_not_known() -> None:
    optimizer = copy.deepcopy(Muon(Net(), lr=0.01))
    (group,) = optimizer.param_groups
    group["params"] = group["params"][1:]
    set_gradients(group["params"], 0)
    with pytest.raises(ValueError, match="expected a rule for each of 15 parameters, got 16"):
        optimizer.step()


def test_group_that_is_added_later_follows_the_rules_of_the_first() -> None:
    net, adamw_for = Net(), ("first", "head", "transposed")
    whole = Muon(net, adamw_for=adamw_for)
    optimizer = Muon(net.hidden, model=net, adamw_for=adamw_for, betas=(0.5, 0.6), momentum=0.8)
    for part in (net.first, net.norm, net.depthwise, net.up, net.seg_layers):
        optimizer.add_param_group({"params": list(part.named_parameters())})
    assert rules(net, optimizer) == rules(net, whole)
    other = [("other", nn.Parameter(torch.randn(4, 4)))]  # not in the model
    optimizer.add_param_group({"params": other})
    assert optimizer.param_groups[-1]["rules"] == ["muon"]
    copied = copy.deepcopy(optimizer)
    copied.add_param_group({"params": [("one more", nn.Parameter(torch.randn(4, 4)))]})
    assert copied.param_groups[-1]["rules"] == ["muon"]
    for own in (optimizer, copied):
        groups = own.param_groups
        assert {(g["betas"], g["momentum"], g["adamw_for"]) for g in groups} == {
            ((0.5, 0.6), 0.8, adamw_for)
        }
    with pytest.raises(TypeError, match="maximize: expected no such option for Muon, got True"):
        optimizer.add_param_group({"params": other, "maximize": True})


@pytest.mark.parametrize("build", [Muon, MuonCPR])
def test_schedulers_cycle_the_momentum(build: type) -> None:
    optimizer = build(Net(), betas=(0.7, 0.8))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, max_momentum=0.9)
    found = []
    for _ in range(9):
        found.append(optimizer.param_groups[0]["momentum"])
        assert optimizer.param_groups[0]["betas"] == (0.7, 0.8)
        optimizer.step()
        schedule.step()
    assert max(found) == 0.9 and min(found) < 0.86


# Steps


def oracle_steps(kind: str, adaptive: bool, nesterov: bool) -> tuple[dict, dict, OracleCPR]:
    """Return the parameters before and after all steps of the oracle, and its CPR."""
    rng = np.random.default_rng(0)
    start = {name: rng.normal(0, 0.2, shape) for name, shape in SHAPES.items()}
    params = {name: x.copy() for name, x in start.items()}
    cpr = OracleCPR(("ki0", 0.9), kind, {"l2": 0.2, "std": 0.02}[kind], adaptive)
    muon = OracleMuon(LR, MOMENTUM, nesterov, transposed=("up",))
    adam = OracleAdam(LR, BETAS, eps=1e-7)
    for t in range(STEPS):
        correction = cpr.correction(
            {n: x for n, x in params.items() if n != "bias"}, dict.fromkeys(params, True)
        )
        for name, x in params.items():
            move = (adam if name in ("bias", "tall") else muon).move(name, gradient(name, x, t))
            params[name] = x + move - correction.get(name, 0.0)
        if t == STEPS // 2:
            assert max(cpr.lam.values()) > 1e-3
    return start, params, cpr


def gradient(name: str, x: np.ndarray, t: int) -> np.ndarray:
    noise = np.random.default_rng([t, *map(ord, name)])
    return 0.1 * (x - 0.5) + noise.normal(0, 0.2, x.shape)


@pytest.mark.parametrize(
    ("dtype", "ns_dtype", "rtol"),
    [
        (torch.float64, "float64", 1e-5),  # the multipliers are float32
        (torch.float32, "float32", 2e-4),
        (torch.float32, "bfloat16", 0.1),
    ],
)
@pytest.mark.parametrize(
    ("regularizer", "adaptive", "nesterov"), [("l2", False, False), ("std", True, True)]
)
def test_agrees_with_the_oracle(
    dtype: torch.dtype, ns_dtype: str, rtol: float, regularizer: str, adaptive: bool, nesterov: bool
) -> None:
    start, expected, oracle = oracle_steps(regularizer, adaptive, nesterov)
    params = {name: nn.Parameter(torch.from_numpy(x).to(dtype)) for name, x in start.items()}
    up = nn.ConvTranspose2d(6, 4, 2, bias=False)
    up.weight = params["up"]
    groups = [
        {"params": [(n, p) for n, p in params.items() if n != "tall"]},
        {"params": [("tall", params["tall"])], "use_muon": False},
    ]
    module = nn.ModuleDict({"up": up, "rest": nn.ParameterDict(params)})
    optimizer = MuonCPR(
        groups,
        lr=LR,
        momentum=MOMENTUM,
        nesterov=nesterov,
        betas=BETAS,
        kappa=KappaKI0(0.9),
        regularizer=regularizer,
        mu=oracle.mu,
        adaptive=adaptive,
        ns_dtype=ns_dtype,
        adamw_for=(),
        model=module,
    )
    for t in range(STEPS):
        for name, p in params.items():
            p.grad = torch.from_numpy(gradient(name, p.detach().double().numpy(), t)).to(dtype)
        optimizer.step()
    assert optimizer.cpr.step_count == STEPS
    for name, p in params.items():
        difference = np.abs(p.detach().double().numpy() - expected[name]).max()
        assert difference < rtol * np.abs(expected[name]).max(), name
    if ns_dtype != "bfloat16":
        lam = [oracle.lam[name] for name in optimizer.cpr.names]
        np.testing.assert_allclose(optimizer.cpr.lagrange_multiplier.numpy(), lam, rtol=1e-2, atol=1e-5)


def test_schedule_sets_the_learning_rate_of_both_rules() -> None:
    """Timm's AdamW rule keeps the rate that the optimizer was built with."""
    moves = []
    for factor in (1.0, 0.25):
        model = Net()
        params = list(model.parameters())
        optimizer = Muon(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch, f=factor: f if epoch else 1.0
        )
        for t in range(2):
            before = [p.detach().clone() for p in params]
            set_gradients(params, t)
            optimizer.step()
            schedule.step()
        moves.append([p.detach() - q for p, q in zip(params, before)])
    for constant, reduced in zip(*moves):
        torch.testing.assert_close(reduced, 0.25 * constant, rtol=1e-3, atol=1e-7)


def test_size_of_the_update_follows_its_option() -> None:
    """Scale the orthogonal matrix to the root mean square of AdamW's updates, or as Muon's authors."""
    updates = []
    for adjust_lr in ("match_rms_adamw", "original"):
        p = nn.Parameter(torch.zeros(16, 4))
        set_gradients([p], 0)
        Muon([p], lr=1.0, momentum=0.0, ns_dtype="float32", adjust_lr=adjust_lr).step()
        updates.append(p.detach())
    torch.testing.assert_close(updates[0] / (0.2 * 16**0.5), updates[1] / (16 / 4) ** 0.5)


def test_closure_is_evaluated_before_the_step() -> None:
    """Start without gradients, with which nothing would move."""
    model = Net()
    before = copy.deepcopy(model)

    def closure() -> float:
        set_gradients(model.parameters(), 0)
        return 1.5

    assert MuonCPR(model, kappa="k1en3").step(closure) == 1.5
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters()))


# State


def test_loaded_state_brings_its_rules() -> None:
    first, second = Net(), Net()
    saved = MuonCPR(first, adamw_for=("head",))
    set_gradients(first.parameters(), 0)
    saved.step()
    other = MuonCPR(second)
    other.load_state_dict(saved.state_dict())
    assert rules(second, other) == rules(first, saved) != rules(second, MuonCPR(second))


# Errors


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"momentum": 1.0}, "momentum: expected 0 or above and below 1, got 1.0"),
        ({"betas": (0.9,)}, r"betas: expected two numbers, got \(0\.9,\)"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]: expected 0 or above and below 1, got 1\.0"),
        ({"adjust_lr": "none"}, "adjust_lr: unknown 'none'; choose from match_rms_adamw, original"),
        ({"ns_coefficients": "cubic"}, "ns_coefficients: unknown preset 'cubic'; choose from original"),
        ({"ns_coefficients": [(1, 2, float("nan"))]}, "ns_coefficients: expected a preset or triples"),
        ({"adamw_for": ["heads"]}, "adamw_for: unknown kind 'heads'; choose from first, head"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        MuonCPR([nn.Parameter(torch.ones(3, 3))], **wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("build", [Muon, AdamCPR])
def test_sparse_gradients_are_refused_before_a_change(build: type) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(3, 3), "embedding": nn.Embedding(6, 3, sparse=True)})
    optimizer = build([{"params": [*part.parameters()]} for part in model.values()])
    model["linear"](model["embedding"](torch.tensor([1]))).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=f"{build.__name__} does not support sparse gradients"):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not any(tensor.any() for state in optimizer.state.values() for tensor in state.values())
    assert build is Muon or optimizer.cpr.step_count == 0


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_rules, "is_sharded", lambda p: True)
    with pytest.raises(TypeError, match="expected a plain tensor, got a DTensor, which Muon does not"):
        Muon([nn.Parameter(torch.ones(3, 3))])


def test_state_of_another_optimizer_is_refused() -> None:
    model = Net()
    adam = CPR(model).attach(torch.optim.Adam(model.parameters()))
    set_gradients(model.parameters(), 0)
    adam.step()
    with pytest.raises(ValueError, match="expected the state of Muon"):
        MuonCPR(model).load_state_dict(adam.state_dict())
