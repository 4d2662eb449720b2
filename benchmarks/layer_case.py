"""One experts layer to race: its sizes, and the same weights, tokens and routing for every contestant.

Legend: T tokens of this rank, K experts per token, D model dim, F expert hidden dim, E experts, e experts of a rank.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import draw, token_counts
from trimtab.errors import ConfigError
from trimtab.layout import experts_per_rank

SHAPES = {"A": (512, 256, 64, 8), "B": (1024, 512, 32, 4), "C": (1024, 2816, 8, 2)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AUTOCAST = "autocast"
"""In place of a dtype: parameters and tokens in float32, the forward under `torch.autocast` to bfloat16."""


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
    """tokens: per rank on average. dtype: of `DTYPES`, or `AUTOCAST`."""

    dim: int
    hidden: int
    num_experts: int
    top_k: int
    tokens: int
    dtype: str
    workload: str = "balanced"
    ranks: int = 1
    device: str = "cpu"

    @classmethod
    def shaped(cls, shape: tuple[int, int, int, int], **more: Any) -> LayerCase:
        """Of shape (D, F, E, K)."""
        dim, hidden, num_experts, top_k = shape
        return cls(dim=dim, hidden=hidden, num_experts=num_experts, top_k=top_k, **more)

    def as_args(self, **more: Any) -> dict[str, Any]:
        """For a contestant."""
        return {"case": asdict(self), **more}

    @classmethod
    def of(cls, args: dict[str, Any]) -> LayerCase:
        """What `as_args` wrote."""
        return cls(**args["case"])

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of parameters and tokens."""
        return DTYPES["fp32" if self.dtype == AUTOCAST else self.dtype]

    @property
    def products(self) -> str:
        """The name of the dtype that products are done in."""
        return "bf16" if self.dtype == AUTOCAST else self.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """What a forward runs under."""
        return torch.autocast(self.device, torch.bfloat16) if self.dtype == AUTOCAST else nullcontext()

    def ids(self, rank: int) -> Tensor:
        """[T, K] of a rank."""
        ids_TK = draw(self.workload, self.tokens, self.top_k, self.num_experts, rank=rank, ranks=self.ranks)
        return ids_TK.to(self.device)


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
        g = torch.Generator(case.device).manual_seed(2000 + rank)
        tokens, dtype = token_counts(case.workload, case.tokens, case.ranks)[rank], case.torch_dtype
        w_TK = torch.rand(tokens, case.top_k, generator=g, device=case.device) + 0.1
        return cls(
            x_TD=torch.randn(tokens, case.dim, generator=g, device=case.device).to(dtype).requires_grad_(),
            ids_TK=case.ids(rank),
            w_TK=(w_TK / w_TK.sum(1, keepdim=True)).to(dtype).requires_grad_(),
            dy_TD=torch.randn(tokens, case.dim, generator=g, device=case.device).to(dtype),
        )


def expert_weights(case: LayerCase, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """gate and up [e, 2F, D] and down [e, D, F] of a rank; of all experts for None."""
    e = experts_per_rank(case.num_experts, case.ranks)
    experts = range(case.num_experts) if rank is None else range(rank * e, rank * e + e)
    gate_up = torch.empty(len(experts), 2 * case.hidden, case.dim, dtype=case.torch_dtype, device=case.device)
    down = torch.empty(len(experts), case.dim, case.hidden, dtype=case.torch_dtype, device=case.device)
    for i, expert in enumerate(experts):
        g = torch.Generator(case.device).manual_seed(3000 + expert)
        gate_up[i] = torch.randn(gate_up.shape[1:], generator=g, device=case.device) * case.dim**-0.5
        down[i] = torch.randn(down.shape[1:], generator=g, device=case.device) * case.hidden**-0.5
    return gate_up, down
