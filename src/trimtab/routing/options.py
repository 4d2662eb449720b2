"""What can be said of a router, as numbers and names: no table is asked what they mean.

Legend: E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COEFFICIENTS = ("aux_loss", "sequence_aux_loss", "global_aux_loss", "z_loss")


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """The fields of `RouterConfig`, which says what each means and checks them: made by way of it alone."""

    num_experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    bias: bool = False
    bias_rate: float = 1e-3
    select: str = "topk"
    sinkhorn_iterations: int = 8
    aux_loss: float = 0.0
    sequence_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float | None = None
    drop: Literal["probability", "position"] = "probability"
    pad: bool = False
    jitter: float = 0.0

    @property
    def factor(self) -> float:
        """The capacity factor, 1 if there is none. Read from text: no symbol in a traced graph."""
        return float(self._factor_text)  # type: ignore[attr-defined]

    @property
    def coefficients(self) -> dict[str, float]:
        """Those of the losses that are taken, by name."""
        return {name: getattr(self, name) for name in COEFFICIENTS if getattr(self, name)}
