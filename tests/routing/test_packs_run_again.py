"""A pack run again, replayed or compiled has the losses, loads and gradients that it has without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimtab
from helpers.comparing import assert_close
from trimtab.moe import MoE, MoEConfig
from trimtab.routing.config import RouterConfig

D, E, K = 8, 6, 2
LENGTHS = [5, 1, 3]
Layer = Callable[..., tuple[Tensor, ...]]


class Block(nn.Module):
    """Two layers with a residual; (y, losses) of one call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        router = RouterConfig(num_experts=E, top_k=K, sequence_aux_loss=0.5, global_aux_loss=0.2, z_loss=0.1, bias=True)
        config = MoEConfig(dim=D, hidden=4, router=router, dtype=torch.float64)
        self.layers = nn.ModuleList([config.build(), config.build()])

    def forward(self, h: Tensor, mask: Tensor | None = None, **packed: Any) -> tuple[Tensor, ...]:
        losses = []
        for layer in self.layers:
            out = layer(h, token_mask=mask, **packed)
            h = h + out.y
            losses += out.losses.values()
        return h, *losses


def pack(*lengths: int, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """x, mask and ids of rows of the same documents."""
    g = torch.Generator().manual_seed(sum(lengths))
    x = torch.randn(rows, sum(lengths), D, generator=g, dtype=torch.float64)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return x, torch.rand(x.shape[:2], generator=g) >= 0.3, trimtab.sequence_ids(cu_seqlens=ends).expand(rows, -1)


def run(block: Block, call: Layer, x: Tensor, mask: Tensor, **packed: Any) -> dict[str, Tensor]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    y, *losses = call(x, mask, **packed)
    torch.autograd.backward([y, *losses], [y.detach().sin(), *map(torch.ones_like, losses)])
    assert x.grad is not None
    found = {"y": y, "dx": x.grad, **{f"loss {i}": loss for i, loss in enumerate(losses)}}
    found |= {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    found |= {f"loads {i}": layer.router.take_loads() for i, layer in enumerate(block.layers)}
    return {name: t.detach().clone() for name, t in found.items()}


def alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(found[name], value, 1e-12, name)


RERUN: dict[str, dict[str, Any]] = {
    "replayed": {"use_reentrant": False, "context_fn": trimtab.replay_in_recompute},
    "decided again": {"use_reentrant": False}, "reentrant": {"use_reentrant": True},
}  # fmt: skip


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("how", RERUN)
def test_recomputed(how: str, most: int | None) -> None:
    block, (x, mask, ids) = Block(), pack(*LENGTHS)
    packed = {"sequence_ids": ids, "num_sequences": most}

    def again(x: Tensor, mask: Tensor, **packed: Any) -> tuple[Tensor, ...]:
        return checkpoint(lambda h: block(h, mask, **packed), x, **RERUN[how])  # type: ignore[no-any-return]

    wanted, found = run(block, block, x, mask, **packed), run(block, again, x, mask, **packed)
    if how == "decided again":  # without a tape its second run is counted, too: see `replay_in_recompute`
        found |= {name: found[name] // 2 for name in found if name.startswith("loads")}
    alike(found, wanted)
    one_sequence = run(block, block, x, mask)
    assert not torch.equal(one_sequence["loss 0"], wanted["loss 0"])
    assert torch.equal(one_sequence["loads 0"], wanted["loads 0"])


def test_ids_that_name_documents_anywhere_are_runs_of_them() -> None:
    block, (x, mask, ids) = Block(), pack(*LENGTHS)
    wanted = run(block, block, x, mask, sequence_ids=ids)
    alike(run(block, block, x, mask, sequence_ids=2 - ids.int(), num_sequences=9), wanted)


def test_decisions_of_a_pack_are_replayed_in_the_documents_and_the_other_way_round() -> None:
    """Weights have moved in between, so that without replay others would be decided."""
    block, (x, mask, ids) = Block(), pack(*LENGTHS, rows=1)
    with trimtab.record(block) as recorded:
        block(x, mask, sequence_ids=ids)
    whole = recorded.decisions()
    with torch.no_grad():
        for layer in block.layers:
            layer.router.weight.neg_()
            layer.router.take_loads()
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    parts = [whole.cut(a, b) for a, b in zip(starts, starts[1:], strict=False)]
    tokens, kept = int(mask.sum()), {}
    for name, layer in block.named_modules():
        if isinstance(layer, MoE):
            chosen = whole.ids[0, mask[0], len(kept)].long().flatten()
            kept[f"{name}.router"] = chosen.bincount(minlength=E)
    trimtab.set_totals(block, tokens, kept)
    with trimtab.replay(block, whole):
        packed = run(block, block, x, mask, sequence_ids=ids)
    apart: dict[str, Tensor] = {}
    pieces = []
    for part, a, b in zip(parts, starts, starts[1:], strict=False):
        with trimtab.replay(block, part):
            found = run(block, block, x[:, a:b], mask[:, a:b])
        pieces.append((found.pop("y"), found.pop("dx")))
        apart = {name: apart.get(name, 0) + value for name, value in found.items()}
    apart |= {name: torch.cat(each, 1) for name, each in zip(("y", "dx"), zip(*pieces, strict=True), strict=True)}
    alike(packed, apart)
    joined = trimtab.Decisions.join(parts)
    with trimtab.replay(block, joined):
        alike(run(block, block, x, mask, sequence_ids=ids), packed)


@pytest.mark.parametrize("most", [None, 4])
def test_compiled_one_graph_serves_packs_of_any_lengths(most: int | None) -> None:
    block, graphs = Block(), 0

    def backend(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    made: list[int] = []
    for lengths in ([5, 1, 3], [2, 2, 7, 4], [9, 12]):
        x, mask, ids = pack(*lengths)
        packed = {"sequence_ids": ids, "num_sequences": most}
        alike(run(block, compiled, x, mask, **packed), run(block, block, x, mask, **packed))
        made.append(graphs)
    assert made == made[:1] * 3  # torch may begin the first one anew
