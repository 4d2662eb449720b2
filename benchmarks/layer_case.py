"""One experts layer to race: its sizes, and the same weights, tokens and routing for every contestant.

Legend: T tokens of this rank, K experts per token, D model dim, F expert hidden dim, E experts, e experts of a rank.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.names import AUTOCAST
from benchmarks.workloads import draw, token_counts
from trimtab.errors import ConfigError
from trimtab.layout import experts_per_rank

SHAPES = {"A": (512, 256, 64, 8), "B": (1024, 512, 32, 4), "C": (1024, 2816, 8, 2)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FAMILIES = {"qwen3_moe": "swiglu", "gpt_oss": "clamped_swiglu"}
"""Whose experts, and their activation; gpt-oss's have biases."""


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """ "A", "B", "C" or "D,F,E,K". Raises ConfigError."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        dim, hidden, experts, top_k = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--shape {text}: must be one of {', '.join(SHAPES)}, or D,F,E,K") from None
    if min(dim, hidden, top_k) < 1 or experts < top_k:
        raise ConfigError(f"--shape {text}: D, F and K must be at least 1, and E at least K")
    return dim, hidden, experts, top_k


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """tokens: per rank on average. dtype: of `DTYPES`, or `AUTOCAST`. in_place: gradients of weights are added to what
    is there, ours into main_grad, peers' into .grad. family: one of `FAMILIES`.
    """

    dim: int
    hidden: int
    num_experts: int
    top_k: int
    tokens: int
    dtype: str
    workload: str = "balanced"
    ranks: int = 1
    in_place: bool = False
    family: str = "qwen3_moe"

    def as_args(self, **more: Any) -> dict[str, Any]:
        """For a contestant."""
        return {"case": asdict(self), **more}

    @classmethod
    def of(cls, args: dict[str, Any]) -> LayerCase:
        """What `as_args` wrote."""
        return cls(**args["case"])

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES["fp32" if self.dtype == AUTOCAST else self.dtype]

    @property
    def products(self) -> str:
        """Of `DTYPES`: what is multiplied in, and what travels."""
        return "bf16" if self.dtype == AUTOCAST else self.dtype

    def autocast(self) -> AbstractContextManager[object]:
        """What a forward runs under."""
        return torch.autocast("cpu", DTYPES[self.products]) if self.dtype == AUTOCAST else nullcontext()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.dim, self.hidden, self.num_experts, self.top_k

    def ids(self, rank: int) -> Tensor:
        """[T, K] int64."""
        return draw(self.workload, self.tokens, self.top_k, self.num_experts, rank=rank, ranks=self.ranks)


@dataclass(frozen=True, kw_only=True)
class LayerData:
    """x_TD and w_TK want gradients."""

    x_TD: Tensor
    ids_TK: Tensor
    w_TK: Tensor
    dy_TD: Tensor

    @classmethod
    def of(cls, case: LayerCase, rank: int) -> LayerData:
        """A rank's tokens."""
        g = torch.Generator().manual_seed(2000 + rank)
        tokens, dtype = token_counts(case.workload, case.tokens, case.ranks)[rank], case.torch_dtype
        w_TK = torch.rand(tokens, case.top_k, generator=g) + 0.1
        return cls(
            x_TD=torch.randn(tokens, case.dim, generator=g).to(dtype).requires_grad_(),
            ids_TK=case.ids(rank),
            w_TK=(w_TK / w_TK.sum(1, keepdim=True)).to(dtype).requires_grad_(),
            dy_TD=torch.randn(tokens, case.dim, generator=g).to(dtype),
        )


def expert_weights(case: LayerCase, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """up [e, 2F, D], gate and up as the family has them, and down [e, D, F] of a rank; of all experts for None."""
    dtype, e = case.torch_dtype, experts_per_rank(case.num_experts, case.ranks)
    experts = range(case.num_experts) if rank is None else range(rank * e, rank * e + e)
    up = torch.empty(len(experts), 2 * case.hidden, case.dim, dtype=dtype)
    down = torch.empty(len(experts), case.dim, case.hidden, dtype=dtype)
    for i, expert in enumerate(experts):
        g = torch.Generator().manual_seed(3000 + expert)
        up[i] = torch.randn(up.shape[1:], generator=g) * case.dim**-0.5
        down[i] = torch.randn(down.shape[1:], generator=g) * case.hidden**-0.5
    return up, down


def expert_biases(case: LayerCase) -> tuple[Tensor, Tensor] | None:
    """[E, 2F] and [E, D] of a family that has biases."""
    if case.family != "gpt_oss":
        return None
    g = torch.Generator().manual_seed(4000)
    widths = 2 * case.hidden, case.dim
    up, down = (torch.randn(case.num_experts, width, generator=g).mul(0.1).to(case.torch_dtype) for width in widths)
    return up, down
