"""VeOmni's expert parallelism: `dispatch_to_ep_class` with its autograd function of the merged gate and up.

It is written for GPUs: importing it asks for the device's capability, and its grouped products are Triton kernels of
bfloat16. Here that question is answered for it, and the two kernels are loops in PyTorch: what is judged is its
exchange, its permutations and the formulas of its backward. The router is the ledger's.

Legend: N tokens, K experts per token, E experts.
"""
# mypy: ignore-errors

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from peers import subject
from trimtab.verify.implementation import Outcome, Share

with (
    patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
    patch("torch.cpu.get_device_name", lambda device=None: "cpu", create=True),
):
    from veomni.distributed.moe import moe_layer


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


class Layers(subject.FunctionLayers):
    """In forward and backward with what stands in for its kernels. Its function asks a state of the whole program for
    the group."""

    def run(self, layer: subject.OwnRouter, h: Tensor, scores_NE: Tensor, ids_NK: Tensor) -> Tensor:
        state = SimpleNamespace(ep_group=layer.group)
        with patch.object(moe_layer, "get_parallel_state", lambda: state):
            return moe_layer.dispatch_to_ep_class(
                moe_layer.EPMergedFc1GroupGemm, self.sizes.num_experts, scores_NE.gather(1, ids_NK), ids_NK,
                h, layer.gate_up, layer.down,
            )  # fmt: skip

    def step(self, share: Share) -> Outcome:
        with stood_in():
            return super().step(share)


class Impl(subject.Impl):
    """As its fused experts call it where expert parallelism is on."""

    name = "veomni"
    layers = Layers

    def lacking(self, t, pattern) -> dict[str, bool]:
        return {
            "without expert parallelism all of it is Triton kernels": t.ep == 1,
            "it is one function over an expert-parallel group; FSDP2 around it is not wired": (
                t.tp > 1 or t.data != "none" or t.cp > 1
            ),
            "its one-hot routing map holds an expert once a token": pattern.name in subject.TWICE,
        }
