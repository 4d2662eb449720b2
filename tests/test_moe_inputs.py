"""The MoE layer: bad input, dtypes, options, jitter, meta device, torch.compile, and experts on two ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from helpers.comparing import assert_close
from helpers.compile_case import assert_same, inputs
from helpers.layer_case import D, E, K, build, parted, parted_results, results
from helpers.ranks import run_ranks
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.errors import ConfigError, InputError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.experts.recipes import MXFP8, NVFP4, FP8Blockwise, FP8Current, FP8Delayed, FP8Rowwise
from trimtab.experts.recipes.base import Recipe
from trimtab.experts.shared import SharedExperts
from trimtab.moe import MoEConfig
from trimtab.parallel.grad_norm import clip_grad_norm_
from trimtab.routing.config import RouterConfig
from trimtab.routing.port import Routing
from trimtab.routing.scores import SCORES


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("select", ["topk", "sinkhorn", "expert_choice", "balanced"])
def test_logits_that_are_not_finite_raise(score: str, select: str) -> None:
    moe = build(layer="blocks.3.moe", router={"score": score, "select": select, "z_loss": 0.1})
    for bad in (float("nan"), float("inf")):
        x = torch.randn(5, D)
        x[2, 3] = bad
        with pytest.raises(InputError, match=r"blocks\.3\.moe.*phase route.*not finite, here those of token\(s\) 2\."):
            moe(x)
        moe(x, token_mask=torch.tensor([True, True, False, True, True]))


def test_wrong_input_names_the_layer() -> None:
    moe = build(layer="blocks.3.moe")
    x = torch.randn(2, 5, D)
    for wrong, says in (
        ({"x": x[..., 1:]}, "x must be"), ({"x": x[0, 0]}, "x must be"), ({"x": x.to_sparse()}, "x must be .*dense"),
        ({"x": x.to(torch.float8_e5m2)}, "x must be .* in float64, float32"), ({"x": x.long()}, "x must be floating"),
        ({"x": x, "token_mask": torch.ones(5, 2).bool()}, "token_mask must be bool"),
        ({"x": x, "token_mask": torch.ones(2, 5)}, "token_mask must be bool"),
        ({"x": x, "ids": torch.zeros(5, 2, K).long()}, "ids must be"),
        ({"x": x, "ids": torch.zeros(2, 5, K)}, "ids to replay must be int"),
        ({"x": x, "ids": torch.zeros(2, 5, K + 1).long()}, rf"ids to replay must be int \[10, {K}\], got"),
        ({"x": x, "ids": torch.full((2, 5, K), E)}, "expert id outside"),
        ({"x": x, "ids": torch.full((2, 5, K), -2)}, "expert id outside"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=rf"blocks\.3\.moe.*{says}"):
            moe(**wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dim": 0}, "dim=0 must be a whole number, at least 1"), ({"dim": -4}, "dim=-4"),
        ({"dim": 16.0}, r"dim=16\.0"), ({"hidden": 0}, "hidden=0"),
        ({"shared_hidden": -1}, "shared_hidden=-1 must be a whole number, at least 0"),
        ({"latent_dim": 0}, "latent_dim=0"), ({"shared_gate": True}, "set shared_hidden"),
        ({"recipe": "fp8"}, "recipe='fp8' is no recipe"), ({"recipe": FP8Current}, "is no recipe"),
        ({"kernels": None}, "kernels=None is neither"), ({"kernels": 3}, "kernels=3 is neither"),
        ({"kernels": "compild"}, "kernels='compild' is not one of .'auto'"),
        ({"dtype": torch.int32}, r"dtype=torch\.int32 is none"), ({"dtype": "bf16"}, "dtype='bf16' is none"),
        ({"dtype": torch.float8_e4m3fn}, r"dtype=torch\.float8_e4m3fn is none"),
        ({"dtype": torch.complex64}, r"dtype=torch\.complex64 is none"),
        ({"combine": "nope"}, "combine='nope' is not one of"),
        ({"activation": "silu"}, "activation 'silu' is not one of"), ({"activation": ["gelu"]}, "is not one of"),
        ({"main_grad": "add"}, "main_grad='add' is not one of"),
        ({"router": None}, "router=None must be a RouterConfig"),
        ({"router": {"num_experts": E, "top_k": K}}, "router={'num_experts': 6, 'top_k': 3} must be a RouterConfig"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_when_the_configuration_is_made(wrong: dict[str, Any], says: str) -> None:
    right = {"dim": D, "hidden": 8, "router": RouterConfig(num_experts=E, top_k=K)}
    with pytest.raises(ConfigError, match=says):
        MoEConfig(**right | wrong)


def test_so_are_its_parts() -> None:
    config = RouterConfig(num_experts=E, top_k=K)
    for made, says in (
        (lambda: config.build(0), "dim=0"), (lambda: config.build(D, dtype=torch.int64), "dtype=torch.int64"),
        (lambda: Dispatcher(0), "num_experts=0 must be"), (lambda: Dispatcher(4.0), r"num_experts=4\.0"),
        (lambda: ExpertMLP(4.0, D, 8), r"num_experts=4\.0"), (lambda: ExpertMLP(4, D, 8, dtype=torch.int8), "int8"),
        (lambda: GroupedLinear(4, D, 0), "out_features=0"), (lambda: GroupedLinear(4, D, 8, recipe="fp8"), "'fp8'"),
        (lambda: SharedExperts(D, 8, activation="silu"), "'silu' of shared experts is not one of"),
        (lambda: SharedExperts(D, 0), "hidden=0"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            made()  # type: ignore[no-untyped-call]
    assert ExpertMLP(np.int64(2), D, 8).num_experts == 2


def test_a_flag_is_true_or_false() -> None:
    takes: dict[Callable[..., Any], tuple[str, ...]] = {
        partial(RouterConfig, num_experts=E, top_k=K): ("normalize", "bias"),
        build: ("bias", "shared_gate", "delay_wgrad"),
        partial(ExpertMLP, E, D, 8): ("bias", "delay_wgrad"),
        partial(GroupedLinear, E, D, 8): ("bias", "single_parameter", "delay_wgrad"),
        partial(SharedExperts, D, 8): ("gated",),
        partial(FP8Delayed, backend="emulated"): ("hybrid",),
        partial(MXFP8, backend="emulated"): ("hybrid",),
        partial(FP8Rowwise, backend="emulated"): ("power_of_two",),
        partial(FP8Blockwise, backend="emulated"): ("power_of_two",),
        partial(NVFP4, backend="emulated"): ("square_weights", "stochastic_gradients"),
        partial(clip_grad_norm_, [torch.ones(3)], 1.0): ("error_if_nonfinite",),
    }
    for make, names in takes.items():
        for name, wrong in product(names, ("false", "no", None, 1, np.array([True]), torch.tensor(True))):
            with pytest.raises(ConfigError, match=rf"{name}={re.escape(repr(wrong))} must be True or False"):
                make(**{name: wrong})
    assert ExpertMLP(2, D, 8, bias=np.True_).gate_up_bias is not None
    assert ExpertMLP(2, D, 8, bias=np.False_).gate_up_bias is None


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_are_refused_with_the_layer_s_name(transform: Any) -> None:
    moe = build(layer="blocks.3.moe")
    with pytest.raises(InputError, match=r"MoE blocks\.3\.moe does not run under torch\.func's transforms"):
        transform(lambda x: moe(x).y.sum())(torch.randn(2, 5, D))


def test_the_router_stays_in_float32() -> None:
    moe = build(torch.bfloat16, router={"bias": True})
    assert moe.router.weight.dtype == torch.float32
    with torch.no_grad():
        moe.router.expert_bias.fill_(1.0009765625)  # which bfloat16 does not hold
    assert moe.to(torch.bfloat16).router.weight.dtype == torch.bfloat16
    assert moe.router.expert_bias.dtype == torch.float32
    assert (moe.router.expert_bias == 1.0009765625).all()
    route = moe.router(torch.randn(4, D).bfloat16())
    assert route.weights_TK.dtype == route.logits_TE.dtype == torch.float32


def test_jitter_is_drawn_while_training_only() -> None:
    moe = build(router={"jitter": 0.1})
    x = torch.randn(9, D)
    moe.router.generator = torch.Generator().manual_seed(3)
    first, second = moe.router(x).logits_TE, moe.router(x).logits_TE
    moe.router.generator.manual_seed(3)
    assert torch.equal(moe.router(x).logits_TE, first)
    assert not torch.equal(first, second)
    moe.eval()
    assert torch.equal(moe.router(x).logits_TE, moe.router(x).logits_TE)
    plain = x @ moe.router.weight.T
    assert 0 < (first - plain).abs().max() < 0.1 * (x.abs() @ moe.router.weight.T.abs()).max()


def test_jitter_is_as_fine_in_bfloat16() -> None:
    moe = build(torch.bfloat16, router={"jitter": 1e-3})
    x = torch.ones(64, D, dtype=torch.bfloat16, requires_grad=True)
    by = moe.router._jittered(x)
    assert by.unique().numel() > 50 * D
    assert (by - 1).abs().max() <= 1.001e-3
    assert (by - 1).mean().abs() < 1e-4
    moe.router(x).logits_TE.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.any()


def test_options_of_the_experts_are_passed_on() -> None:
    recipe = FP8Current(backend="emulated")
    moe = build(recipe=recipe, delay_wgrad=True, main_grad="accumulate", combine="ordered", hidden=16)
    experts = moe.experts
    assert (experts.recipe, experts.delay_wgrad, experts.main_grad) == (recipe, True, "accumulate")
    assert moe.dispatcher.combine_mode == "ordered"
    assert moe.fingerprint.startswith(f"dim {D}, hidden 16, combine ordered, recipe fp8_current")
    assert moe.fingerprint.endswith(f", router: num_experts {E}, top_k {K}")
    others = (
        build(hidden=16), build(activation="geglu"), build(bias=True), build(shared_hidden=4), build(latent_dim=D),
        build(router={"aux_loss": 0.1}), build(router={"jitter": 0.1}), build(dtype=torch.bfloat16),
    )  # fmt: skip
    assert len({each.fingerprint for each in others}) == len(others)
    assert build(main_grad="accumulate", delay_wgrad=True, kernels="torch").fingerprint == build().fingerprint


def test_meta_device_first() -> None:
    router = RouterConfig(num_experts=E, top_k=K, bias=True)
    config = MoEConfig(dim=D, hidden=4, router=router, shared_hidden=4, latent_dim=8, device="meta")
    moe = config.build().to_empty(device="cpu")
    for module in moe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert moe(torch.randn(7, D)).y.isfinite().all()
    assert moe.router.take_loads().sum() == 7 * K


@pytest.mark.parametrize("recipe", [FP8Delayed(backend="emulated"), NVFP4(backend="emulated", seed=7)], ids=str)
def test_a_recipe_s_state_begins_anew_on_the_device(recipe: Recipe, poisoned: None) -> None:
    config = MoEConfig(dim=D, hidden=16, router=RouterConfig(num_experts=E, top_k=K), recipe=recipe)
    fresh = dict(config.build().experts.named_buffers())
    assert fresh
    moe = replace(config, device="meta").build().to_empty(device="cpu")
    for name, buffer in moe.experts.named_buffers():
        assert torch.equal(buffer, fresh[name]), name
    assigned = replace(config, device="meta").build()
    assigned.load_state_dict(config.build().state_dict(), assign=True)  # what is not saved is still on meta
    x = torch.randn(7, D, requires_grad=True)
    checkpoint(lambda x: assigned(x).y, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


class Int8Linear(torch.nn.Module):
    """A linear layer whose weight is held as codes, as those of quantisation libraries are."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().max() / 127
        self.scale = scale
        self.weight = torch.nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).T


def test_shared_experts_hand_quantised_layers_the_tokens_as_they_are() -> None:
    shared, x = SharedExperts(D, 8, gated=True), torch.randn(5, D)
    true = shared(x)
    for name in ("up", "down", "gate"):
        setattr(shared, name, Int8Linear(getattr(shared, name)))
    assert_close(shared(x), true, 5e-2, "y")


def test_what_has_no_weight_takes_the_place_of_a_linear_layer() -> None:
    shared, x = SharedExperts(D, 8, gated=True, dtype=torch.bfloat16), torch.randn(5, D)
    true = shared(x)
    for name in ("up", "down", "gate"):
        setattr(shared, name, torch.nn.Sequential(getattr(shared, name)))
    assert torch.equal(shared(x), true)


class Counting(torch.nn.Module):
    """Says how often a weight is computed."""

    calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight


def test_a_computed_weight_is_computed_once_a_forward() -> None:
    """As a power iteration or noise in it counts on. Under the dtype that it is computed from."""
    moe = MoEConfig(
        dim=D, hidden=8, latent_dim=4, shared_hidden=8, router=RouterConfig(num_experts=E, top_k=K),
        dtype=torch.bfloat16,
    ).build()  # fmt: skip
    owners = (moe.shared.up, moe.shared.down, moe.to_latent, moe.from_latent, moe.router)
    for owner in owners:
        register_parametrization(owner, "weight", Counting(), unsafe=True)
        owner.parametrizations.weight[0].calls = 0
    moe(torch.randn(5, D))
    assert [owner.parametrizations.weight[0].calls for owner in owners] == [1] * len(owners)


def test_the_router_compiles_without_a_break() -> None:
    router = {"score": "sigmoid", "bias": True, "groups": 3, "top_groups": 2, "aux_loss": 0.1, "capacity_factor": 1.0}
    moe = build(router=router)
    compiled = torch.compile(moe.router, fullgraph=True, backend="eager")
    for tokens in (6, 0):
        x = torch.randn(tokens, D)
        ours, true = compiled(x, batch=2), moe.router(x, batch=2)
        aux, true_aux = (moe.router.losses(made)["aux"] for made in (ours, true))
        assert torch.equal(ours.ids_TK, true.ids_TK)
        assert_close(ours.weights_TK, true.weights_TK, 1e-6, "weights")
        assert_close(aux, true_aux, 1e-6, "aux")
        compiled_grad, grad = (
            torch.autograd.grad(made.weights_TK.sum() + loss, moe.router.weight)[0]
            for made, loss in ((ours, aux), (true, true_aux))
        )
        assert_close(compiled_grad, grad, 2e-6, "gradient")
    assert moe.router.take_loads().sum() == 2 * 6 * K


class Plain(torch.nn.Module):
    """A router of one's own, which knows of what a layer needs and no more."""

    def forward(self, x: torch.Tensor, **_: Any) -> Routing:
        ids = torch.arange(x.shape[0])[:, None] % E
        weights, loads = torch.ones(ids.shape), torch.bincount(ids.flatten(), minlength=E)
        return Routing(ids_TK=ids, weights_TK=weights, loads_E=loads, logits_TE=x)

    def losses(self, routing: Routing) -> dict[str, torch.Tensor]:
        return {"mine": routing.logits_TE.sum()}


def test_a_router_of_one_s_own() -> None:
    moe = build(router={"aux_loss": 0.1})
    moe.router = Plain()  # type: ignore[assignment]
    x = torch.randn(7, D)
    out = moe(x)
    assert set(out.losses) == {"mine"}
    assert torch.equal(out.y, moe.experts(x, out.ids_TK, torch.ones(7, 1)))


SELECTIONS = (
    {"normalize": True}, {"select": "expert_choice"}, {"select": "sinkhorn", "score": "sigmoid"},
    {"capacity_factor": 1.0}, {"select": "balanced"},
)  # fmt: skip


def on_ranks() -> None:
    """The layer with experts on several ranks against the same with all of them here: another T on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for router in SELECTIONS:
        whole, here = (build(torch.float64, router=router, shared_hidden=4, latent_dim=8) for _ in range(2))
        parted(here)
        for tokens in (5 * rank + 1, 0 if rank == ranks - 1 else 7, 0):
            given = inputs((tokens,), torch.float64)
            assert_same(results(here, here, given), parted_results(results(whole, whole, given)), 1e-12)
        with pytest.raises(InputError, match=r"layer moe.*rank 0: \d+ slot"):
            here(torch.full((3, D), float("nan") if rank == 0 else 1.0, dtype=torch.float64))
        with pytest.raises(InputError, match=r"layer moe.*got a DTensor of .*, whose to_local\(\) is dense"):
            here(DTensor.from_local(torch.ones(3, D), init_device_mesh("cpu", (ranks,))))


def test_on_two_ranks_and_what_one_of_them_cannot_route_raises_on_both() -> None:
    run_ranks(on_ranks, 2)


def test_training_after_a_first_call_in_inference_mode() -> None:
    with torch.device("meta"):
        moe = build(layer="moe")
    moe.to_empty(device="cpu")
    for module in moe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    x = torch.randn(5, D)
    with torch.inference_mode():
        moe.eval()(x)
    moe.train()(x).y.sum().backward()
    assert moe.router.take_loads().sum() == 5 * K


@pytest.mark.parametrize(
    ("dtype", "experts"), [(torch.uint8, 256), (torch.uint8, 8), (torch.int8, 128), (torch.int16, 8)]
)
def test_ids_of_any_integers(dtype: torch.dtype, experts: int) -> None:
    dispatcher, ids = Dispatcher(experts, layer="moe"), torch.tensor([[0, experts - 1], [1, 2]], dtype=dtype)
    x, w = torch.randn(2, D), torch.ones(2, 2)
    rows = dispatcher.dispatch(x, ids, w)
    assert rows.ids_MK.tolist() == ids.tolist()
    assert torch.equal(dispatcher.combine(rows.x_MD, rows), x)
    with pytest.raises(InputError, match=r"1 slot\(s\) with an expert id outside"):
        Dispatcher(experts - 1, layer="moe").dispatch(x, ids, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_ids_that_are_no_integers(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="expert ids must be int"):
        Dispatcher(8, layer="moe").dispatch(torch.randn(2, D), torch.ones(2, 1).to(dtype), torch.ones(2, 1))
    with pytest.raises(InputError, match="ids to replay must be int"):
        build(layer="moe")(torch.randn(2, D), ids=torch.ones(2, K).to(dtype))
