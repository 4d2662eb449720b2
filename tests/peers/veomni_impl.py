"""VeOmni's expert parallelism: `dispatch_to_ep_class` with its autograd function of the merged gate and up.

It is written for GPUs: importing it asks for the device's capability, and its grouped products are Triton kernels of
bfloat16. Here that question is answered for it, and the two kernels are loops in PyTorch: what is judged is its
exchange, its permutations and the formulas of its backward. The router is the ledger's.

Legend: N tokens, K experts per token, E experts.
"""
# mypy: ignore-errors

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from peers import over_experts
from peers.asked import reason
from trimtab.verify.implementation import Outcome, Place, Share, Subject
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
        return Layers(place, sizes, weights, Layer)


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


class Layer(over_experts.Layer):
    """Its function asks a state of the whole program for the group."""

    def forward(self, h: Tensor) -> Tensor:
        scores_NE, ids_NK = self.routed(h)
        state = SimpleNamespace(ep_group=self.group)
        with patch.object(moe_layer, "get_parallel_state", lambda: state):
            y = moe_layer.dispatch_to_ep_class(
                moe_layer.EPMergedFc1GroupGemm, self.sizes.num_experts, scores_NE.gather(1, ids_NK), ids_NK,
                h, self.gate_up, self.down,
            )  # fmt: skip
        return y.view_as(h)


class Layers(over_experts.Layers):
    """One topology's stack, in forward and backward with what stands in for its kernels."""

    def step(self, share: Share) -> Outcome:
        with stood_in():
            return super().step(share)
