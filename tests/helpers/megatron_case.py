"""One MoE layer of Megatron's on a rank, its inputs, and the dense float64 truth of all ranks.

Legend: S positions, B sequences, T tokens of a rank, K experts per token, H hidden size, E experts, F hidden size of an
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from helpers.megatron_cpu import built, megatron, megatron_ranks
from trimtab.verify.truth import dense_moe

EXPERTS, TOP_K, H, HIDDEN = 8, 2, 16, 8
KINDS = ("dispatcher", "pair", "linears")
"""Our dispatcher before Megatron's SequentialMLP; with our experts; before Megatron's TEGroupedMLP with our linears."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """tokens: (S, B) of each rank, in turn for the micro-batches in `steps`. use: options of `use`; None for Megatron's
    own layer. options: of the TransformerConfig. padding: which fraction of each rank's tokens is padding, at the end.
    bound: of errors, relative to the largest value.
    """

    tokens: Sequence[tuple[int, int]]
    use: dict[str, Any] | None = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 1
    padding: Sequence[float] = ()
    hot: bool = False
    spread: float = 1.0
    bound: float = 1e-5
    frozen: tuple[str, ...] = ()
    wanted: Sequence[bool] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(case: Case) -> dict[str, Tensor]:
    made = {"router": drawn(EXPERTS, H, seed=0) * case.spread, "up": drawn(EXPERTS, 2 * HIDDEN, H, seed=1) / 4}
    made["down"] = drawn(EXPERTS, H, HIDDEN, seed=2) / 3
    return {name: w.to(case.dtype).double() for name, w in made.items()}


def config_of(case: Case) -> Any:
    sizes = {"tp": 1, "ep": 1, "etp": 1, "cp": 1} | case.sizes
    plain: dict[str, Any] = {
        "num_layers": 2, "hidden_size": H, "ffn_hidden_size": HIDDEN, "num_attention_heads": 2,
        "num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_ffn_hidden_size": HIDDEN,
        "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False,
        "gated_linear_unit": True, "activation_func": F.silu, "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "tensor_model_parallel_size": sizes["tp"], "expert_model_parallel_size": sizes["ep"],
        "expert_tensor_parallel_size": sizes["etp"], "context_parallel_size": sizes["cp"],
        "sequence_parallel": sizes["tp"] > 1, "params_dtype": case.dtype, "bf16": case.dtype == torch.bfloat16,
        "moe_router_dtype": None if case.dtype == torch.float32 else "fp32",
    }  # fmt: skip
    options = plain | case.options
    later = options.pop("delay_wgrad_compute", False)  # Megatron wants its overlap of micro-batches with it
    config = megatron.core.transformer.TransformerConfig(**options)
    config.delay_wgrad_compute = later
    return config


def spec_of(case: Case) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from trimtab.integrations.megatron import use

    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    return spec if case.use is None else use(spec, **case.use)


def layer_of(case: Case, config: Any = None) -> Any:
    """The layer of this rank, with its share of `weights`."""
    layer = built(spec_of(case).submodules.mlp, config=config_of(case) if config is None else config)
    layer.set_layer_number(1)
    all_ = weights(case)
    ep, etp = layer.token_dispatcher.ep_group.rank(), (layer.token_dispatcher.tp_rank, layer.token_dispatcher.tp_size)
    mine = slice(ep * layer.num_local_experts, (ep + 1) * layer.num_local_experts)
    width = case.options.get("moe_latent_size", H)
    up = share(all_["up"][mine, :, :width], etp)
    down = all_["down"][mine, :width].chunk(etp[1], 2)[etp[0]]
    with torch.no_grad():
        layer.router.weight.copy_(all_["router"])
        for name, wanted in (("linear_fc1", up), ("linear_fc2", down)):
            for param, value in zip(parameters_of(layer, name), wanted, strict=True):
                param.copy_(value)
    for name, param in layer.named_parameters():
        param.requires_grad_(not name.startswith(case.frozen or ("-",)))
    return layer


def share(up_EIH: Tensor, place: tuple[int, int]) -> Tensor:
    """Of gate and of up alike."""
    return torch.cat([half.chunk(place[1], 1)[place[0]] for half in up_EIH.chunk(2, 1)], 1)


def parameters_of(layer: Any, name: str, attribute: str = "") -> list[Tensor]:
    """One [.., ..] of each local expert; or their gradients."""
    if hasattr(layer.experts, "local_experts"):
        found = [expert.get_submodule(name).weight for expert in layer.experts.local_experts]
    else:
        named = layer.experts.get_submodule(name).named_parameters()
        found = [param for own, param in named if own.startswith("weight")]
    if attribute:
        found = [getattr(param, attribute) for param in found]
    return list(found[0]) if len(found) == 1 and found[0] is not None and found[0].dim() == 3 else found


@dataclass(frozen=True, kw_only=True)
class Input:
    x_SBH: Tensor
    dy_SBH: Tensor
    padding_BS: Tensor | None


def input_of(case: Case, rank: int, step: int) -> Input:
    s, b = case.tokens[(rank + step) % len(case.tokens)]
    x, dy = drawn(s, b, H, seed=100 + 10 * step + rank), drawn(s, b, H, seed=200 + 10 * step + rank)
    if case.hot:
        x = x * 0.1 + weights(case)["router"][EXPERTS - 1]
    mask = None
    if case.padding:
        keep = s - int(s * case.padding[rank % len(case.padding)])
        mask = (torch.arange(s) >= keep).expand(b, s)
    return Input(x_SBH=x.to(case.dtype), dy_SBH=dy.to(case.dtype), padding_BS=mask)


def top_k(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits_TE.topk(TOP_K)
    return ids, values.softmax(1)


Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits [T, E] float64 -> ids and weights [T, K], before any drop."""


def truth(case: Case, kept: list[list[Tensor]], route: Route = top_k) -> dict[str, Any]:
    """y and dx by (rank, step); gradients of the experts by rank that has the tokens, and of the router, over steps.

    kept: ids [T, K] that were dispatched, by rank and step, -1 where none was.
    """
    of = {name: w.requires_grad_() for name, w in weights(case).items()}
    found: dict[str, Any] = {"y": [], "dx": [], **{name: [] for name in of}}
    for rank, by_step in enumerate(kept):
        loss, xs = torch.zeros((), dtype=torch.float64), []
        for step, ids_kept in enumerate(by_step):
            given = input_of(case, rank, step)
            x = given.x_SBH.double().flatten(0, 1).requires_grad_()
            ids, w = route(x @ of["router"].T)
            chosen = (ids[:, :, None] == ids_kept[:, None, :]).any(-1)
            assert int(chosen.sum()) == int((ids_kept >= 0).sum()), "dispatched what was not chosen"
            y = dense_moe(x, ids.where(chosen, -1), w, of["up"], of["down"])
            xs.append(x)
            found["y"].append(y.detach())
            loss = loss + (y * given.dy_SBH.double().flatten(0, 1)).sum()
        grads = torch.autograd.grad(loss, [*xs, *of.values()], allow_unused=True, materialize_grads=True)
        found["dx"] += grads[: len(xs)]
        for name, grad in zip(of, grads[len(xs) :], strict=True):
            found[name].append(grad)
    return found


def run_layer(case: Case, layer: Any = None) -> dict[str, Any]:
    """A step of `case.steps` micro-batches on this rank, all forwards before any backward; what came out."""
    layer = layer_of(case) if layer is None else layer
    kept = watch(layer)
    rank, results, backward = dist.get_rank(), [], []
    wanted = case.wanted[rank % len(case.wanted)] if case.wanted else True
    for step in range(case.steps):
        given = input_of(case, rank, step)
        x = given.x_SBH.requires_grad_(wanted)
        masked = {} if given.padding_BS is None else {"padding_mask": given.padding_BS}
        y, bias = layer(x, **masked)
        assert bias is None
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        results.append((x, y))
        backward.append((y, given.dy_SBH))
    ids = list(kept)
    for y, dy in backward:
        if y.requires_grad:
            y.backward(dy)
    if layer.config.delay_wgrad_compute:
        layer.backward_dw()
    assert getattr(layer.token_dispatcher, "_call", None) is None
    return {
        "y": [y.detach().flatten(0, 1) for _, y in results],
        "dx": [None if x.grad is None else x.grad.flatten(0, 1) for x, _ in results],
        "router": layer.router.weight.grad, "up": parameters_of(layer, "linear_fc1", "grad"),
        "down": parameters_of(layer, "linear_fc2", "grad"), "kept": ids, "experts": layer.local_expert_indices,
        "etp": (layer.token_dispatcher.tp_rank, layer.token_dispatcher.tp_size),
        "peers": dist.get_process_group_ranks(layer.token_dispatcher.tp_ep_group),
    }  # fmt: skip


def watch(layer: Any) -> list[Tensor]:
    """Will hold the ids of each dispatch, in a recompute too."""
    kept: list[Tensor] = []
    dispatch = layer.token_dispatcher.exchange.dispatch

    def watched(x: Tensor, ids: Tensor, w: Tensor, **options: Any) -> Any:
        kept.append(ids.detach().clone())
        return dispatch(x, ids, w, **options)

    layer.token_dispatcher.exchange.dispatch = watched
    return kept


def errors(case: Case, answers: list[dict[str, Any]], route: Route = top_k) -> dict[str, float]:
    """max |error| / max |truth| of each result over all ranks."""
    true = truth(case, [answer["kept"][: case.steps] for answer in answers], route)
    largest: dict[str, float] = {}

    def compare(name: str, got: Tensor | None, wanted: Tensor, scale: float) -> None:
        assert got is not None, f"no gradient of {name}"
        off = (got.double() - wanted).abs()
        assert off.isfinite().all(), f"{name} is not finite"
        largest[name] = max(largest.get(name, 0.0), float(off.max()) / scale if off.numel() else 0.0)

    scale = {name: max([float(t.abs().max()) for t in ts if t.numel()] + [1e-30]) for name, ts in true.items()}
    for rank, answer in enumerate(answers):
        for step in range(case.steps):
            for name in ("y", "dx"):
                if name == "y" or not case.wanted or case.wanted[rank % len(case.wanted)]:
                    compare(name, answer[name][step], true[name][rank * case.steps + step], scale[name])
        if "router" not in case.frozen:
            compare("router", answer["router"], true["router"][rank], scale["router"])
        mine = slice(answer["experts"][0], answer["experts"][-1] + 1)
        up, down = (sum(true[name][peer] for peer in answer["peers"])[mine] for name in ("up", "down"))
        whole = {"up": share(up, answer["etp"]), "down": down.chunk(answer["etp"][1], 2)[answer["etp"][0]]}
        for name, wanted in whole.items():
            if "experts" in case.frozen:
                assert answer[name] == [None] * len(answer[name])
                continue
            for got, one in zip(answer[name], wanted, strict=True):
                compare(name, got, one, scale[name])
    return largest


def run_layers(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Each on this rank, in turn."""
    return {name: run_layer(case) for name, case in cases.items()}


def check(cases: dict[str, Case], world: int, route: Route = top_k, deadline: float = 90.0) -> list[dict[str, Any]]:
    """Run each on `world` ranks, the same ones for all, whose sizes are the first one's; each result must be the
    truth. What came out, by rank and case."""
    sizes = next(iter(cases.values())).sizes
    answers = megatron_ranks(run_layers, world, cases, **sizes, deadline=deadline)
    found = {name: errors(case, [answer[name] for answer in answers], route) for name, case in cases.items()}
    wrong = {name: off for name, off in found.items() if max(off.values()) > cases[name].bound}
    assert not wrong, wrong
    return answers


def of_kind(case: Case, kind: str) -> Case:
    from trimtab.integrations.megatron.linears import grouped_mlp

    experts = grouped_mlp() if kind == "linears" else kind == "pair"
    return replace(case, use={**(case.use or {}), "experts": experts})


def of_kinds(cases: dict[str, Case]) -> dict[str, Case]:
    """Each of every kind, but where Megatron recomputes inside of its experts, which needs TransformerEngine."""
    return {
        f"{name}, {kind}": of_kind(case, kind)
        for name, case in cases.items()
        for kind in KINDS if kind != "linears" or "moe_act" not in case.options.get("recompute_modules", ())
    }  # fmt: skip
