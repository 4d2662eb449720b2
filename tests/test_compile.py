"""`torch.compile` of the whole local layer: one graph, for any number of tokens, with the numbers of eager mode."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from helpers.compile_case import any_count, assert_same, compiled, inputs
from helpers.layer_case import BOUNDS, E, K, assert_true, build, loss_of, results
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.errors import InputError
from trimtab.experts.recipes import FP8Current
from trimtab.integrations.transformers.routers.observe import record, replay
from trimtab.kernels.choose import KernelChoice, get_backend
from trimtab.moe import MoE
from trimtab.parallel.experts import ParallelExperts
from trimtab.routing.balance import set_totals
from trimtab.routing.port import Routing
from trimtab.routing.recompute import replay_in_recompute
from trimtab.routing.router import Router

FP32, BF16 = torch.float32, torch.bfloat16
COUNTS = (5, 0, 1, 64)
LOSSES = {"aux_loss": 0.3, "sequence_aux_loss": 0.2, "z_loss": 0.1}
MASKED: dict[str, bool] = {"masked": True}
CASES: dict[str, tuple[dict[str, Any], torch.dtype, dict[str, bool]]] = {
    "softmax": ({"router": {"normalize": True, "scale": 1.5}, "activation": "geglu"}, FP32, MASKED),
    "sigmoid": ({"router": {"score": "sigmoid", "bias": True, "groups": 3, "top_groups": 2} | LOSSES, "bias": True},
                FP32, MASKED),
    "sqrt, all around it": ({
        "router": {"score": "sqrtsoftplus", "normalize": True, "top_k": 2}, "activation": "clamped_swiglu",
        "bias": True, "latent_dim": 8, "shared_hidden": 10, "shared_gate": True,
    }, torch.float64, {}),
    "capacity": ({"router": {"capacity_factor": 0.6}, "activation": "relu_squared", "shared_hidden": 6}, FP32, MASKED),
    "capacity by position, ordered": (
        {"router": {"capacity_factor": 0.6, "drop": "position"}, "activation": "gelu", "combine": "ordered"}, FP32, {},
    ),
    "expert choice, ordered": (
        {"router": {"select": "expert_choice", "capacity_factor": 1.1}, "combine": "ordered"}, FP32, MASKED,
    ),
    "expert choice": ({"router": {"select": "expert_choice"}}, FP32, MASKED),
    "replay": ({"router": {"normalize": True, "score": "sigmoid"}, "combine": "ordered"}, FP32, {"replay": True}),
    "bf16": ({"router": {"normalize": True}, "bias": True, "shared_hidden": 6}, BF16, MASKED),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    dynamo.reset()
    counters.clear()
    yield
    dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_one_graph_for_any_number_of_tokens(name: str) -> None:
    config, dtype, what = CASES[name]
    moe = build(dtype, **config)
    run, counter = compiled(moe)
    for tokens in COUNTS:
        given = inputs((tokens,), dtype, **what)
        eager, ours = results(moe, moe, given), results(run, moe, given, any_count)
        assert_same(ours, eager, 2e-6)
        assert_true(ours, moe, given, dtype)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


def test_dynamic_shapes_compile_again_for_0_and_1_alone() -> None:
    moe = build(router={"select": "sinkhorn", "sinkhorn_iterations": 2})
    run, _ = compiled(moe, dynamic=True)
    for shape, graphs in (((3, 5), 1), ((2, 64), 1), ((0, 5), 2), ((1, 7), 3), ((2, 3), 3)):
        given = inputs(shape, FP32)
        assert_same(results(run, moe, given), results(moe, moe, given), 2e-6)
        assert counters["stats"]["unique_graphs"] == graphs, shape
    assert not counters["graph_break"]


@pytest.mark.parametrize(("router", "dynamic"), [({"select": "expert_choice"}, True), ({}, True), ({}, None)], ids=str)
def test_a_capacity_is_no_symbol(router: dict[str, Any], dynamic: bool | None) -> None:
    """Two layers of one code, with factors of their own, and any number of tokens."""
    layers = [build(router=router | {"capacity_factor": factor}, combine="ordered") for factor in (1.1, 0.6)]
    runs = [compiled(moe, dynamic=dynamic)[0] for moe in layers]
    for tokens in (12, 30):
        given = inputs((tokens,), FP32, masked=True)
        for run, moe in zip(runs, layers, strict=True):
            assert_same(results(run, moe, given), results(moe, moe, given), 2e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_router_compiled_alone_is_counted_once_by_a_checkpoint(use_reentrant: bool) -> None:
    moe = build(router={"aux_loss": 0.1, "global_aux_loss": 0.1})
    moe.router.compile(backend="eager")
    x = torch.randn(6, moe.config.dim, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        out = moe(x)
        return out.y.square().sum() + sum(out.losses.values())

    options = {} if use_reentrant else {"context_fn": replay_in_recompute}
    checkpoint(run, x, use_reentrant=use_reentrant, **options).backward()
    assert moe.router.take_loads().sum() == 6 * K


@pytest.mark.parametrize("how", ["class", "instance", "hook", "hook on all"])
def test_a_router_that_somebody_changes_says_nothing_of_its_room(how: str) -> None:
    """Here none of its ids are dropped after all."""

    def undone(router: Router, x: Tensor, *_: Tensor, **options: Any) -> Routing:
        made: Routing = Router.forward(router, x, **options)
        return made._replace(ids_TK=made.ids_TK.clamp(min=0))

    def after(module: torch.nn.Module, _: object, made: Routing) -> Routing | None:
        return made._replace(ids_TK=made.ids_TK.clamp(min=0)) if isinstance(module, Router) else None

    moe = build(router={"capacity_factor": 0.5, "aux_loss": 0.1})
    everywhere = None
    if how == "class":
        moe.router.__class__ = type("Undone", (Router,), {"forward": undone})
    elif how == "instance":
        moe.router.forward = MethodType(undone, moe.router)  # type: ignore[method-assign]
    elif how == "hook":
        moe.router.register_forward_hook(after)
    else:
        everywhere = register_module_forward_hook(after)
    try:
        x = torch.randn(40, moe.config.dim)
        eager = moe(x)
        moe.compile(backend="eager")
        graph = moe(x)
    finally:
        if everywhere is not None:
            everywhere.remove()
    assert (eager.ids_TK >= 0).all()
    assert torch.equal(graph.y, eager.y)
    assert torch.equal(graph.losses["aux"], eager.losses["aux"])


def test_every_token_masked_and_an_expert_without_rows() -> None:
    moe = build(bias=True, shared_hidden=6)
    run, counter = compiled(moe)
    x, mask, ids = inputs((6,), FP32, masked=True, replay=True)
    assert mask is not None
    assert ids is not None
    none, some = torch.zeros_like(mask), torch.ones_like(mask)
    for given in ((x, none, ids), (x.nan_to_num(), some, ids.clamp(max=2)), (x.nan_to_num(), some, ids * 0 - 1)):
        eager, ours = results(moe, moe, given), results(run, moe, given)
        assert_same(ours, eager, 2e-6)
        assert ours["loads"][-1] == 0
        assert (ours["experts.gate_up"][-1] == 0).all()
    assert counter.frame_count == 1


def test_layers_that_differ_in_name_share_a_graph() -> None:
    class Blocks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(build(layer=f"layers.{i}") for i in (0, 1, 10))

    blocks = Blocks()
    for layer in blocks.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
        x = inputs((4,), FP32)[0]
        layer(x)
        with pytest.raises(InputError, match=rf"layer {layer.dispatcher.layer}, phase route.*1 slot\(s\)"):
            layer(x, ids=torch.tensor([[0, 1, 2]] * 3 + [[0, 1, E]]))
    assert counters["stats"]["unique_graphs"] == 2  # with ids and without


def test_bad_numbers_still_raise() -> None:
    moe = build(layer="moe", router=LOSSES)
    run, _ = compiled(moe)
    x = inputs((4,), FP32)[0]
    run(x)
    x[2, 3] = float("inf")
    for training in (True, False):
        with torch.set_grad_enabled(training), pytest.raises(InputError, match=r"layer moe, phase route.*3 slot"):
            run(x)
    with pytest.raises(InputError, match="x must be"):
        torch.compile(moe, backend="eager")(x[:, :4])


def test_frozen_parameters_and_no_gradients_at_all() -> None:
    moe = build(bias=True, shared_hidden=6)
    for name in ("gate_up", "down_bias"):
        getattr(moe.experts, name).requires_grad_(False)
    run, _ = compiled(moe)
    x = inputs((4,), FP32)[0]
    grads = []
    for forward in (moe, run):
        moe.zero_grad()
        loss_of(forward(x)).backward()  # not even the tokens'
        grads.append({name: None if p.grad is None else p.grad.clone() for name, p in moe.named_parameters()})
    assert {name for name, grad in grads[1].items() if grad is None} == {"experts.gate_up", "experts.down_bias"}
    assert_same(*({n: g for n, g in each.items() if g is not None} for each in reversed(grads)), 2e-6)
    moe.eval()
    with torch.no_grad():
        eager, ours = moe(x), run(x)
    assert torch.equal(ours.y, eager.y)
    assert moe.router.take_loads().sum() == 2 * 4 * K


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing(inside: bool, selective: bool) -> None:
    """The whole compiled with the checkpoint inside, and a checkpoint around what is compiled: counted once."""
    moe = build(router=LOSSES | {"global_aux_loss": 0.2, "capacity_factor": 0.8}, shared_hidden=6)
    policy = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    context = partial(replay_in_recompute, policy) if selective else replay_in_recompute
    if inside:

        def body(x: torch.Tensor, **more: Any) -> Any:
            return checkpoint(moe, x, use_reentrant=False, context_fn=context, **more)

        run = torch.compile(body, fullgraph=True, backend="aot_eager")
    else:
        whole, _ = compiled(moe)

        def run(x: torch.Tensor, **more: Any) -> Any:
            return checkpoint(whole, x, use_reentrant=False, context_fn=context, **more)

    given = inputs((2, 5), FP32)
    assert_same(results(run, moe, given), results(moe, moe, given), 2e-6)


def test_recorded_and_replayed() -> None:
    moe = torch.nn.ModuleDict({"moe": build(router={"capacity_factor": 0.8})})
    x = inputs((2, 5), FP32)[0]
    with record(moe) as recording:
        run, _ = compiled(moe["moe"])
        first = run(x)
        decisions = recording.decisions()
        eager = moe["moe"](x)
        assert torch.equal(decisions.ids, recording.decisions().ids)
    assert torch.equal(first.ids_TK, eager.ids_TK)
    with replay(moe, decisions):
        assert torch.equal(run(x + 0.3).ids_TK, first.ids_TK)


def _own_kernels() -> MoE:
    return build(kernels=KernelChoice(get_backend("torch", torch.device("cpu"))))


def _main_grad() -> MoE:
    moe = build(main_grad="accumulate")
    for p in (moe.experts.gate_up, moe.experts.down):
        p.main_grad = torch.zeros_like(p)
    return moe


STATEFUL = {
    "delayed": lambda: build(delay_wgrad=True), "recipe": lambda: build(recipe=FP8Current(backend="emulated")),
    "kernels": _own_kernels, "main_grad": _main_grad,
}  # fmt: skip


@pytest.mark.parametrize("name", STATEFUL)
def test_what_has_state_runs_between_two_graphs(name: str) -> None:
    """Compiled autograd leaves out what runs eagerly."""
    moe, x, found = STATEFUL[name](), inputs((5,), FP32)[0], []
    run, _ = compiled(moe, "eager")
    with pytest.raises(dynamo.exc.Unsupported, match="an option has state"):
        run(x)
    graph = torch.compile(moe, backend="eager")
    whole = torch.compile(lambda x: loss_of(moe(x)).backward(), backend="eager")
    ways = [lambda: loss_of(moe(x)).backward(), lambda: loss_of(graph(x)).backward(), lambda: whole(x)]
    for way in ways if name in ("delayed", "main_grad") else ways[:2]:
        moe.zero_grad()
        with dynamo.config.patch(compiled_autograd=way is ways[2]):
            way()
        moe.experts.backward_dw()
        found.append({n: getattr(p, "main_grad", p.grad).clone() for n, p in moe.named_parameters()})
        for p in moe.parameters():
            if hasattr(p, "main_grad"):
                p.main_grad.zero_()
    for other in found[1:]:
        assert_same(other, found[0], 2e-6)
    assert any(grad.abs().max() > 0 for grad in found[0].values())


def test_tangents_are_refused_in_a_graph_as_they_are_eagerly() -> None:
    """torch takes zeros for those of an operator, and for gradients where a function's weight needs one too."""
    moe = build(shared_hidden=6).eval()
    x = torch.randn(5, moe.config.dim)

    def run(x: Tensor) -> Tensor:
        return moe(x).y

    def slope_along(x: Tensor) -> Tensor:
        return torch.func.jvp(run, (x,), (x,))[1]

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: run(x).square().sum())(x)

    compiled_run = torch.compile(run, backend="eager")
    with torch.no_grad():
        true = compiled_run(x)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            with pytest.raises(InputError, match="forward-mode AD"):
                compiled_run(dual)
        assert torch.equal(compiled_run(x), true)
    for transform in (slope_along, gradient):
        with pytest.raises(InputError, match=r"torch\.func"):
            torch.compile(transform, backend="eager")(x)
        with torch.no_grad():
            assert torch.equal(compiled_run(x), true)
        dynamo.reset()  # what has left a graph once is not tried again
        with pytest.raises(dynamo.exc.Unsupported, match="InputError"):
            torch.compile(transform, backend="eager", fullgraph=True)(x)


def test_a_graph_serves_any_number_of_tokens_in_a_step() -> None:
    moe = build(router={"aux_loss": 0.3})
    run, counter = compiled(moe)
    x = inputs((5,), FP32)[0]
    graphs = []
    for tokens in (11.0, 12.0, torch.tensor(13.0), 14.0):
        set_totals(moe, tokens)
        found = [loss_of(forward(x)).detach()[None] for forward in (moe, run)]
        assert_same({"loss": found[1]}, {"loss": found[0]}, 2e-6)
        graphs.append(counter.frame_count)
    assert graphs == [graphs[0]] * 4


def test_each_function_that_is_run_again_has_a_count_of_graphs_of_its_own() -> None:
    """Dynamo gives up a code object after eight graphs, whoever shares it."""
    codes = {f.__code__ for f in (Dispatcher.dispatch, Dispatcher.combine, ParallelExperts.forward)}
    assert len(codes) == 3
    assert {code.co_name for code in codes} == {"dispatch", "combine", "forward"}


def test_inductor() -> None:
    # Few operations, for each is compiled by the C++ compiler; an infinite logit's score is finite.
    moe = build(router={"top_k": 1, "score": "sigmoid"}, kernels="torch")
    run, counter = compiled(moe, "inductor")
    for tokens in (5, 0):
        given = inputs((tokens,), FP32)
        ours = results(run, moe, given, any_count)
        assert_same(ours, results(moe, moe, given), BOUNDS[FP32])
        assert_true(ours, moe, given, FP32)
    assert counter.frame_count == 1
    for odd in (math.nan, math.inf):
        x, *_ = given = inputs((5,), FP32)
        x[3, 0] = odd
        any_count(given)
        with pytest.raises(InputError, match="1 slot"):
            run(x)
