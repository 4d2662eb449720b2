"""Options of the exchange, which every integration takes: checked once, where they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.errors import ConfigError
from trimtab.validation import check_sizes, is_finite

CombineMode = Literal["sum", "ordered"]
COMBINE_MODES: tuple[CombineMode, ...] = ("sum", "ordered")
Replication = Literal["off", "auto"] | float
COPY_COST = 1000
"""Slots: between ranks of one host; links between hosts take ten times as many."""
PARTS = 1024
"""A tolerance is a whole number of so many parts of the mean; at most so many times the mean."""


def check_combine(combine: str, layer: str = "") -> None:
    """Raises ConfigError for no such way to combine."""
    if combine not in COMBINE_MODES:
        raise ConfigError(f"combine={combine!r} is not one of {COMBINE_MODES}", layer=layer)


@dataclass(frozen=True, kw_only=True)
class ReplicationConfig:
    """When experts are replicated. The same on every rank.

    tolerance: how far above the mean the most loaded rank may be, 0.1 for 10 %, rounded down to 1/1024; None
        chooses for each call what costs least, see `copy_cost`.
    copy_cost: slots that one replica must take off the most loaded rank to be worth it.

    Raises:
        ConfigError: a tolerance that is no number from 0 to 1024, a copy_cost that is no whole number to 2**32.
    """

    tolerance: float | None = None
    copy_cost: int

    def __post_init__(self) -> None:
        check_sizes(0, copy_cost=self.copy_cost)
        if self.copy_cost > 2**32:
            raise ConfigError(f"copy_cost={self.copy_cost!r} must be at most 2**32")
        t = self.tolerance
        if t is not None and not (is_finite(t) and not isinstance(t, bool) and 0 <= t <= PARTS):
            raise ConfigError(f"tolerance={t!r} must be None or a number from 0 to {PARTS}, 0.1 for 10 %")

    @property
    def parts(self) -> int | None:
        """The tolerance in PARTS of the mean."""
        return None if self.tolerance is None else int(self.tolerance * PARTS)


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of the exchange, the same on every rank of the expert group.

    transport: how rows travel, a name in `trimtab.dispatch.transports.TRANSPORTS`.
    combine: as in `trimtab.Dispatcher`.
    replicate_experts, copy_cost: as in `trimtab.ExpertParallel`.

    Raises:
        ConfigError: one of them does not exist, or is none that `ReplicationConfig` takes.
    """

    transport: str = "alltoall"
    combine: CombineMode = "sum"
    replicate_experts: Replication = "off"
    copy_cost: int = COPY_COST

    def __post_init__(self) -> None:
        from trimtab.dispatch.transports import TRANSPORTS

        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport={self.transport!r} is not one of {tuple(TRANSPORTS)}")
        check_combine(self.combine)
        if isinstance(self.replicate_experts, str) and self.replicate_experts not in ("off", "auto"):
            what = f"replicate_experts={self.replicate_experts!r}"
            raise ConfigError(f"{what} is neither 'off', 'auto' nor a tolerance such as 0.1")
        _ = self.replication

    @property
    def replication(self) -> ReplicationConfig | None:
        """The rule by which experts are replicated, None where none are."""
        above = None if isinstance(self.replicate_experts, str) else self.replicate_experts
        config = ReplicationConfig(tolerance=above, copy_cost=self.copy_cost)
        return None if self.replicate_experts == "off" else config
