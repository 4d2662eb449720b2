"""What a router does, as one value: scores, selection, weights, balance. `build` makes the module.

Legend: T tokens of a rank, E experts, D model dim, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

import trimtab
from trimtab.errors import ConfigError
from trimtab.routing.scores import SCORES
from trimtab.routing.select import SELECTS
from trimtab.validation import check_flags, check_sizes, is_finite, is_whole

GROUP_SCORES = ("top2", "max")
DROPS = ("probability", "position")
BIAS_RULES = ("sign", "quantile")
COEFFICIENTS = ("aux_loss", "sequence_aux_loss", "global_aux_loss", "z_loss")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """All about the routing decision.

    Args:
        num_experts: E, over all ranks.
        top_k: K, the experts that a token goes to.
        score: how logits become scores, in float32 at least; a name of `trimtab.routing.scores.SCORES`.
        normalize: the picked scores are divided by their sum (for softmax the same as a softmax over the picked).
        scale: factor on the weights, after normalizing.
        groups: experts are cut into so many equal runs (DeepSeek-V3, arXiv 2412.19437).
        top_groups: only so many of these runs, a token's best ones, may be picked from.
        group_score: what a group is worth, the sum of its best two scores ("top2") or its best ("max").
        bias: an expert bias joins the scores for the selection only (aux-loss-free balancing, arXiv 2408.15664).
        bias_rule: how it moves, once per optimizer step, see `trimtab.update_bias`: "sign" by `bias_rate` towards the
            mean load; "quantile" to what would have made them even, without a rate (see `trimtab.routing.quantile`;
            of scores up to 1, without groups).
        bias_rate: how far "sign" moves a bias in a step.
        select: how experts are chosen; a name of `trimtab.routing.select.SELECTS`. Sinkhorn and expert choice balance
            the tokens of a call on this rank; a single token has nothing beside it.
        sinkhorn_iterations: how often "sinkhorn" goes over the scores.
        aux_loss: coefficient of the balance loss over a micro-batch of all ranks, 0 for none
            (`trimtab.routing.losses`).
        sequence_aux_loss: coefficient of the balance loss over each sequence, 0 for none.
        global_aux_loss: coefficient of the balance loss over an optimizer step so far, 0 for none.
            `trimtab.update_bias(model)` after each step ends it, with a bias or without; so does `Router.take_loads`.
        z_loss: coefficient of the mean square of logsumexp(logits), 0 for none.
        capacity_factor: an expert takes at most ceil(factor * K * T / E) slots of this rank's T tokens; None for all.
            With expert choice it is how many an expert picks, factor 1 if None. It holds in `eval()` as well: what a
            token gets then depends on those beside it. To serve one by one as in a batch, None.
        drop: which slots stay when there are too many: those of the largest weight ("probability") or of the first
            tokens ("position").
        jitter: while training, inputs are multiplied by uniform(1 - jitter, 1 + jitter).

    Raises:
        ConfigError: names unknown, flags that are none or numbers that do not fit.
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    bias: bool = False
    bias_rule: Literal["sign", "quantile"] = "sign"
    bias_rate: float = 1e-3
    select: str = "topk"
    sinkhorn_iterations: int = 8
    aux_loss: float = 0.0
    sequence_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float | None = None
    drop: Literal["probability", "position"] = "probability"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(num_experts=self.num_experts)
        if not is_whole(self.top_k) or not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"top_k={self.top_k!r} is not in 1..{self.num_experts}, the number of experts")
        named = (("score", tuple(SCORES)), ("select", tuple(SELECTS)), ("group_score", GROUP_SCORES), ("drop", DROPS))
        for name, known in (*named, ("bias_rule", BIAS_RULES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of {known}")
        check_flags(normalize=self.normalize, bias=self.bias)
        check_sizes(groups=self.groups, top_groups=self.top_groups, sinkhorn_iterations=self.sinkhorn_iterations)
        for name in ("scale", "bias_rate", "jitter", *COEFFICIENTS):
            if not is_finite(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a finite number")
        for problem, is_one in self._problems().items():
            if is_one:
                raise ConfigError(problem)
        # Text is no symbol in a traced graph, as a number would be.
        object.__setattr__(self, "_factor", repr(float(self.capacity_factor or 1.0)))

    @property
    def experts_pick(self) -> bool:
        """Whether experts pick tokens: a decision has a column for each expert."""
        return SELECTS[self.select].experts_pick

    @property
    def columns(self) -> int:
        """How many ids a decision has for each token."""
        return self.num_experts if self.experts_pick else self.top_k

    def room(self, tokens: int) -> int:
        """Slots that one expert takes of this rank's `tokens`: ceil(factor * K * T / E), symbolic in a traced graph."""
        slots = float(self._factor) * self.top_k * tokens / self.num_experts  # type: ignore[attr-defined]
        whole = math.trunc(slots)  # not `math.ceil`: an exported program that holds one cannot be saved
        part = math.trunc((slots - whole) * 2.0**52)  # above 1 there is no fraction below 2^-52
        return whole + torch.sym_min(part, 1)  # type: ignore[no-untyped-call, no-any-return]

    def _problems(self) -> dict[str, bool]:
        even = self.num_experts % self.groups == 0
        in_group = self.num_experts // self.groups if even else 0
        coefficients = tuple(getattr(self, name) for name in COEFFICIENTS)
        factor = self.capacity_factor
        return {
            f"{self.num_experts} experts do not divide into {self.groups} groups": not even,
            f"top_groups={self.top_groups} is not in 1..{self.groups}": self.top_groups > self.groups,
            f"top_k={self.top_k} of {self.top_groups} groups of {in_group} experts: there are not so many": (
                even and self.top_k > self.top_groups * in_group
            ),
            f"group_score='top2' needs groups of at least 2 experts, these have {in_group}": (
                self.groups > 1 and self.group_score == "top2" and in_group < 2
            ),
            f"groups and bias work with select='topk', not with {self.select!r}": (
                self.select != "topk" and (self.groups > 1 or self.bias)
            ),
            "bias_rule='quantile' moves a bias: set bias=True": self.bias_rule == "quantile" and not self.bias,
            f"bias_rule='quantile' is for scores up to 1 of more experts than a token takes, without groups; "
            f"score={self.score!r}, groups={self.groups}, top_k={self.top_k} of {self.num_experts}": (
                self.bias_rule == "quantile"
                and not (SCORES[self.score].to_one and self.groups == 1 and self.top_k < self.num_experts)
            ),
            f"capacity_factor={factor!r} must be a finite number above 0, or None for no limit": (
                factor is not None and not (is_finite(factor) and factor > 0)
            ),
            f"jitter={self.jitter} is not in 0 <= jitter < 1": not 0 <= self.jitter < 1,
            f"loss coefficients must not be negative: {coefficients}": min(coefficients) < 0,
        }

    def build(
        self, dim: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None, layer: str = ""
    ) -> trimtab.Router:
        """The module for tokens of `dim`. dtype: of its weight, float32 if not given. layer: its name, for errors."""
        return trimtab.Router(self, dim, dtype=dtype, device=device, layer=layer)
