"""Megatron's packs before our router: the loss per sequence is that of each document, as of the documents one by one.

Legend: T tokens of a rank, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.megatron_case import EXPERTS, Case, H, config_of, drawn, layer_of, parameters_of
from helpers.megatron_cpu import built, megatron, megatron_ranks, moe_utils, parallel_state
from trimtab.errors import InputError
from trimtab.integrations.megatron.packs import TellsPacks, documents

LENGTHS = [[5, 1, 3, 7], [], [9, 2]]
EVEN = [[8, 4, 12]]
"""What context parallelism cuts into two parts for each rank."""
OPTIONS: dict[str, Any] = {
    "moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.4], "moe_z_loss_coeff": 0.05,
    "calculate_per_token_loss": True, "moe_router_dtype": "fp64", "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}  # fmt: skip
"""Losses are sums, so that those of documents add up."""
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@dataclass(frozen=True, kw_only=True)
class Cut:
    """sizes: Megatron's. lengths: of the documents by data-parallel rank. tail: tokens behind the last document."""

    sizes: dict[str, int]
    lengths: list[list[int]]
    options: dict[str, Any]
    padded: float = 0.0
    tail: int = 0


def packed_params(lengths: list[int], **more: Any) -> Any:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    made = {"qkv_format": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends} | more
    return megatron.core.packed_seq_params.PackedSeqParams(**made)


def data_of(cut: Cut, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """x and dy [T, H], padding [T] of a data-parallel rank."""
    n = sum(cut.lengths[d]) + cut.tail
    padding = torch.rand(n, generator=torch.Generator().manual_seed(d)) < cut.padded
    return drawn(n, H, seed=100 + d), drawn(n, H, seed=200 + d), padding


def layer_in(cut: Cut) -> Any:
    case = Case(
        tokens=[], use={"router": "trimtab"}, options=OPTIONS | cut.options, sizes=cut.sizes, dtype=torch.float64
    )
    layer = layer_of(case)
    layer.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, dtype=torch.float64)
    return layer


def run(layer: Any, x: Tensor, dy: Tensor, padding: Tensor, packs: Any) -> Tensor:
    """Forward; backward of a later one begins after it has run. Output."""
    layer.packs = packs
    y, _ = layer(x[:, None], padding_mask=padding[None])
    layer.packs = None
    return y[:, 0]


def experts_of(layer: Any) -> dict[str, Tensor]:
    return {name: torch.stack(list(parameters_of(layer, name, "grad"))) for name in ("linear_fc1", "linear_fc2")}


def apart(cut: Cut) -> dict[str, Any]:
    """On one rank, the documents of all data-parallel ranks one by one."""
    layer = layer_in(Cut(sizes={}, lengths=[], options={}))
    ys, dxs = [], []
    for d, lengths in enumerate(cut.lengths):
        x, dy, padding = data_of(cut, d)
        x.requires_grad_()
        rows = [*lengths, cut.tail] if cut.tail else lengths
        parts = torch.arange(x.shape[0]).split(rows) if rows else [torch.arange(0)]
        y = torch.cat([run(layer, x[part], dy[part], padding[part], None) for part in parts])
        y.backward(dy)
        ys.append(y.detach())
        dxs.append(x.grad)
    return {
        "y": ys, "dx": dxs, "router": layer.router.weight.grad, "loads": layer.router.local_tokens_per_expert,
        **experts_of(layer),
    }  # fmt: skip


def held(cut: Cut, lengths: list[int]) -> Tensor:
    """The positions of this rank: of each document two parts, then of what these make its share."""
    state, size = parallel_state, cut.sizes.get("cp", 1)
    c = state.get_context_parallel_rank()
    mine, start = [], 0
    for n in lengths if size > 1 else []:
        half = torch.arange(start, start + n).chunk(2 * size)
        mine += [half[c], half[2 * size - 1 - c]]
        start += n
    whole = torch.cat(mine) if size > 1 else torch.arange(sum(lengths) + cut.tail)
    return whole.chunk(cut.sizes.get("tp", 1))[state.get_tensor_model_parallel_rank()]


def on_rank(cut: Cut) -> dict[str, Any]:
    d = parallel_state.get_data_parallel_rank()
    layer, lengths = layer_in(cut), cut.lengths[d]
    x, dy, padding = data_of(cut, d)
    mine = held(cut, lengths)
    x = x[mine].requires_grad_()
    y = run(layer, x, dy[mine], padding[mine], packed_params(lengths))
    with torch.no_grad():  # of another pack, before the first is run again
        run(layer, x, dy[mine], padding[mine], packed_params([1] * sum(lengths)))
    y.backward(dy[mine])
    router, loads = layer.router.weight.grad, layer.router.local_tokens_per_expert
    dist.all_reduce(router)
    dist.all_reduce(loads)
    return {
        "d": d, "held": mine, "y": y.detach(), "dx": x.grad, "router": router, "loads": loads,
        "experts": layer.local_expert_indices, **experts_of(layer),
    }  # fmt: skip


CUTS = {
    "one rank": (1, Cut(sizes={}, lengths=LENGTHS[:1], options={})),
    "a tail": (1, Cut(sizes={}, lengths=LENGTHS[:1], options={}, tail=4)),
    "padding": (1, Cut(sizes={}, lengths=LENGTHS[:1], options={}, padded=0.4)),
    "recomputed": (1, Cut(sizes={}, lengths=LENGTHS[:1], options=RECOMPUTED)),
    "one has none": (2, Cut(sizes={"ep": 2}, lengths=LENGTHS[:2], options={})),
    "uneven": (2, Cut(sizes={"ep": 2}, lengths=LENGTHS[::2], options=RECOMPUTED, padded=0.3)),
    "tp": (2, Cut(sizes={"tp": 2, "ep": 2}, lengths=LENGTHS[:1], options={})),
    "cp": (2, Cut(sizes={"cp": 2, "ep": 2}, lengths=EVEN, options={}, padded=0.3)),
    "tp, cp": (4, Cut(sizes={"tp": 2, "cp": 2, "ep": 4}, lengths=EVEN, options=RECOMPUTED)),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_a_pack_is_its_documents_one_by_one(name: str) -> None:
    ranks, cut = CUTS[name]
    (true,) = megatron_ranks(apart, 1, cut)
    for found in megatron_ranks(on_rank, ranks, cut, **cut.sizes):
        wanted = {key: true[key][found["d"]][found["held"]] for key in ("y", "dx")}
        wanted |= {key: true[key] for key in ("router", "loads")}
        mine = slice(found["experts"][0], found["experts"][-1] + 1)
        wanted |= {key: true[key][mine] for key in ("linear_fc1", "linear_fc2")}
        for key, value in wanted.items():
            assert found[key].shape == value.shape, key
            off = float((found[key] - value).abs().max()) if value.numel() else 0.0
            assert off <= 1e-12 * max(1.0, float(value.abs().max()) if value.numel() else 1.0), (key, off)


def told() -> None:
    """A layer around, built of a spec, hands on what it is given; another forward in its backward does not reach it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from trimtab.integrations.megatron import use

    case = Case(tokens=[], options=OPTIONS | RECOMPUTED, dtype=torch.float64)
    theirs = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    inside = TransformerLayerSubmodules(mlp=theirs.submodules.mlp, mlp_bda=theirs.submodules.mlp_bda)
    spec = type(theirs)(module=TransformerLayer, submodules=inside)
    ours = use(spec, router="trimtab")
    assert spec.module is TransformerLayer
    assert use(spec).module is TransformerLayer
    assert ours.module.__name__ == "TransformerLayer"
    assert issubclass(ours.module, TellsPacks)
    assert issubclass(ours.module, TransformerLayer)
    layer = built(ours, config=config_of(case)).double()
    asked: list[Any] = []
    route, moe = layer.mlp.router.forward, layer.mlp

    def watched(*args: Any, packs: Any) -> Any:
        asked.append(packs)
        return route(*args, packs=packs)

    moe.router.forward = watched
    packs = [packed_params([5, 3]), packed_params([1] * 8), None]
    ys = [
        layer(drawn(8, 1, H, seed=1).requires_grad_(), attention_mask=None, packed_seq_params=each)[0] for each in packs
    ]
    for y in ys:
        y.sum().backward()
    assert [id(each) for each in asked] == [id(each) for each in packs * 2]
    assert moe.packs is None


def test_a_layer_tells_its_experts_of_its_packs() -> None:
    megatron_ranks(told, 1)


def test_which_document_a_token_is_in() -> None:
    x = torch.zeros(8, 1, H)
    for given, tp, cp, ids in (
        (packed_params([5, 0, 3]), (0, 1), 1, [0] * 5 + [2] * 3), (packed_params([5]), (0, 1), 1, [0] * 5 + [1] * 3),
        (packed_params([8, 8]), (1, 2), 1, [1] * 8), (packed_params([8, 8]), (0, 1), 2, [0] * 4 + [1] * 4),
        (packed_params([5, 2], cu_seqlens_q_padded=torch.tensor([0, 6, 8])), (0, 1), 1, [0] * 6 + [1] * 2),
    ):  # fmt: skip
        found = documents(given, x, tp, cp)
        assert found is not None
        assert found[0].tolist() == ids
        assert found[1] == given.cu_seqlens_q.shape[0]
    for none in (None, packed_params([8], qkv_format="sbhd"), packed_params([8], cu_seqlens_q=None)):
        assert documents(none, x, (0, 1), 1) is None
    with pytest.raises(InputError, match="packs over 2 context-parallel ranks"):
        documents(packed_params([8], local_cp_size=2), x, (0, 1), 1)
