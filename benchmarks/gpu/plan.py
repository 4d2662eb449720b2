"""Steps of a small model against their plans: what PyTorch's allocator counts at the most, and what was said before.

Legend: B batch, L positions, D model dim, h heads, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import trimtab
from benchmarks.gpu.child import Measuring

BOUND = 0.05
"""How far a plan may be off."""


@dataclass(frozen=True, kw_only=True)
class Case:
    dim: int = 1024
    experts: int = 32
    layers: int = 4
    vocabulary: int = 32000
    shape: tuple[int, int] = (4, 1024)
    kernels: str = "grouped_mm"
    autocast: bool = False
    recompute: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


CASES = {
    "bfloat16 by autocast": {"autocast": True},
    "bfloat16, recompute": {"autocast": True, "recompute": True},
    "bfloat16, fused AdamW, long": {
        "autocast": True, "shape": (1, 8192), "optimizer": partial(torch.optim.AdamW, fused=True),
    },
    "bfloat16, Triton between products": {"autocast": True, "kernels": "grouped_mm+triton"},
    "float32, SGD": {"optimizer": torch.optim.SGD},
}  # fmt: skip
TINY = {"dim": 64, "experts": 4, "layers": 2, "vocabulary": 128, "shape": (2, 16), "kernels": "auto"}


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        router = trimtab.RouterConfig(num_experts=case.experts, top_k=min(4, case.experts))
        self.norm, self.qkv = nn.RMSNorm(case.dim), nn.Linear(case.dim, 3 * case.dim, bias=False)
        self.moe = trimtab.MoEConfig(
            dim=case.dim, hidden=case.dim // 2, router=router, kernels=case.kernels, dtype=torch.float32
        ).build()

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self.qkv(self.norm(x_BLD)).chunk(3, -1))
        x_BLD = x_BLD + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y_BLD: Tensor = x_BLD + self.moe(x_BLD).y
        return y_BLD


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.embed = case, nn.Embedding(case.vocabulary, case.dim)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.head = nn.Linear(case.dim, case.vocabulary, bias=False)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x_BLD = self.embed(ids_BL)
        for block in self.blocks:
            again = partial(checkpoint, block, use_reentrant=False, context_fn=trimtab.replay_in_recompute)
            x_BLD = again(x_BLD) if self.case.recompute else block(x_BLD)
        logits_BLV: Tensor = self.head(x_BLD)
        return logits_BLV


def build(case: Case, device: str) -> Model:
    with torch.device(device):
        return Model(case)


def loop(case: Case, model: Any) -> None:
    """Two steps: the first one makes the moments."""
    optimizer = case.optimizer(model.parameters(), lr=1e-4)
    device = model.head.weight.device
    for _ in range(2):
        ids_BL = torch.randint(case.vocabulary, case.shape, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=case.autocast):
            logits = model(ids_BL)
        F.cross_entropy(logits.flatten(0, 1).float(), ids_BL.flatten()).backward()
        del logits
        optimizer.step()
        optimizer.zero_grad()


def measure(run: Measuring) -> str:
    """Rows of (case, planned bytes, bytes that were allocated at the most, and reserved); what lies outside of both."""
    rows: list[dict[str, Any]] = []
    for name, options in CASES.items():
        if run.left() <= 0:
            break
        case = Case(**(options if run.on_cuda else options | TINY))
        plan = trimtab.plan_memory(partial(build, case, "meta"), partial(loop, case), device=run.device)
        gc.collect()
        before = torch.cuda.memory_allocated() if run.on_cuda else 0
        if run.on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        loop(case, build(case, run.device))
        row: dict[str, Any] = {"case": name, "plan": plan.peak, "parts": plan.parts}
        if run.on_cuda:
            row["allocated"] = torch.cuda.max_memory_allocated() - before
            row["reserved"] = torch.cuda.max_memory_reserved()
            free, whole = torch.cuda.mem_get_info()
            row["outside"] = whole - free - torch.cuda.memory_reserved()
        rows.append(row)
        run.save(rows=rows)
    off = {row["case"]: row["plan"] / row["allocated"] - 1 for row in rows if "allocated" in row}
    if not off:
        return f"{len(rows)} plans and their steps ran; the CPU has no allocator's count to hold them against"
    far = [name for name, by in off.items() if abs(by) > BOUND]
    return ", ".join(f"{name} {by:+.1%}" for name, by in off.items()) + (f"; beyond {BOUND:.0%}: {far}" if far else "")
