"""VeOmni's expert parallelism: `dispatch_to_ep_class` with its autograd function of the merged gate and up.

It is written for GPUs: importing it asks for the device's capability, and its grouped products are Triton kernels of
bfloat16. Here that question is answered for it, and the two kernels are loops in PyTorch: what is judged is its
exchange, its permutations and the formulas of its backward. The router is the ledger's.

Legend: R rows by local expert, N tokens, K experts per token, E experts, e experts of this rank.
"""
# mypy: ignore-errors

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.layout import shard_cuts
from trimtab.verify.adapters import Outcome, Place, Share, Subject, averaged, reason, residual
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import LayerWeights, Sizes

with (
    patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
    patch("torch.cpu.get_device_name", lambda device=None: "cpu", create=True),
):
    from veomni.distributed.moe import moe_layer


class Impl:
    """As its fused experts call it where expert parallelism is on."""

    name = "veomni"
    refusal: type[Exception] = Exception

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        t = topology
        lacking = {
            "without expert parallelism all of it is Triton kernels": t.ep == 1,
            "it is one function over an expert-parallel group; FSDP2 around it is not wired": (
                t.tp > 1 or t.data != "none" or t.cp > 1
            ),
            "its one-hot routing map holds an expert once a token": (
                pattern.name in ("duplicates", "one_rank", "lone_rank")
            ),
        }
        return reason(lacking, t, pattern, grouped_mm=False)

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        return Layers(place, sizes, weights)


def group_gemm_same_nk(a, b, cumsum_M, max_M, transpose_a=False, transpose_b=False, **options) -> Tensor:
    """In place of its Triton kernel: rows of expert g times b[g]."""
    ends = cumsum_M.tolist()
    parts = [a[start:end] @ (w.mT if transpose_b else w) for start, end, w in zip([0, *ends], ends, b)]  # noqa: B905
    return torch.cat(parts)


def group_gemm_same_mn(a, b, c, cumsum_K, max_K, transpose_a=False, transpose_b=False, **options) -> None:
    """In place of its Triton kernel: c[g] = a^T b over the rows of expert g."""
    ends = cumsum_K.tolist()
    for start, end, out in zip([0, *ends], ends, c):  # noqa: B905
        torch.mm(a[start:end].T, b[start:end], out=out)


def all_gather_into_tensor(output, given, group=None) -> None:
    """Gloo takes [P * E] from [E], not the [P, E] that NCCL also takes."""
    dist.all_gather_into_tensor(output.view(-1), given, group=group)


def stood_in() -> contextlib.ExitStack:
    """All of the above in place."""
    stack = contextlib.ExitStack()
    for function in (group_gemm_same_nk, group_gemm_same_mn):
        stack.enter_context(patch.object(moe_layer, function.__name__, function))
    gloo = SimpleNamespace(**{**vars(dist), "all_gather_into_tensor": all_gather_into_tensor})
    stack.enter_context(patch.object(moe_layer, "dist", gloo))
    return stack


class Layer(nn.Module):
    """A router of the ledger's in front of VeOmni's experts."""

    def __init__(self, place: Place, sizes: Sizes, w: LayerWeights) -> None:
        super().__init__()
        cuts, j = shard_cuts(sizes.num_experts, place.topology.ep), place.experts["ep"].get_local_rank()
        mine = slice(cuts[j], cuts[j + 1])
        self.sizes = sizes
        self.state = SimpleNamespace(ep_group=place.experts["ep"].get_group())
        for name, value in (("router", w.router_ED), ("gate_up", w.up_EID[mine]), ("down", w.down_EDF[mine])):
            self.register_parameter(name, nn.Parameter(value.to(place.device, sizes.dtype).contiguous()))
        self.replayed_NK: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        scores_NE = (h.flatten(0, 1) @ self.router.T).softmax(1)
        ids_NK = scores_NE.topk(self.sizes.top_k, 1).indices if self.replayed_NK is None else self.replayed_NK
        with patch.object(moe_layer, "get_parallel_state", lambda: self.state):
            y = moe_layer.dispatch_to_ep_class(
                moe_layer.EPMergedFc1GroupGemm, self.sizes.num_experts, scores_NE.gather(1, ids_NK), ids_NK,
                h, self.gate_up, self.down,
            )  # fmt: skip
        return y.view_as(h)


class Layers:
    """One topology's stack."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> None:
        self.place = place
        self.layers = nn.ModuleList(Layer(place, sizes, w) for w in weights)

    def step(self, share: Share) -> Outcome:
        self.layers.zero_grad()
        x = share.x_BlD.clone().requires_grad_()
        for layer in self.layers:
            layer.replayed_NK = None if share.ids_BlK is None else share.ids_BlK.flatten(0, 1)
        with stood_in():
            y = residual(self.layers, x, lambda layer, h: layer(h))
            y.backward(share.dy_BlD)
        found = {}
        for i, layer in enumerate(self.layers):
            found[f"{i}.router"] = averaged(layer.router.grad, self.place, False)
            found |= {f"{i}.up": self._whole(layer.gate_up.grad), f"{i}.down": self._whole(layer.down.grad)}
        return Outcome(y=y, dx=x.grad, grads=found)

    def _whole(self, grad: Tensor) -> Tensor:
        averaged(grad, self.place, True)
        parts = [torch.empty_like(grad) for _ in range(self.place.topology.ep)]
        dist.all_gather(parts, grad, group=self.place.experts["ep"].get_group())
        return torch.cat(parts)
