"""Options of the exchange, which every integration takes: checked once, where they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trimtab.errors import ConfigError

if TYPE_CHECKING:
    from trimtab.dispatch.replication.plan import ReplicationConfig

CombineMode = Literal["sum", "ordered"]
COMBINE_MODES: tuple[CombineMode, ...] = ("sum", "ordered")
Replication = Literal["off", "auto"] | float
COPY_COST = 1000
"""Slots: between ranks of one host; links between hosts take ten times as many."""


def replication_config(replicate_experts: Replication, copy_cost: int = COPY_COST) -> ReplicationConfig | None:
    """The rule that a user's words name; None for "off".

    Raises:
        ConfigError: neither "off", "auto" nor a number; what `ReplicationConfig` does not take.
    """
    from trimtab.dispatch.replication.plan import ReplicationConfig

    if isinstance(replicate_experts, str):
        if replicate_experts not in ("off", "auto"):
            raise ConfigError(
                f"replicate_experts={replicate_experts!r} is neither 'off', 'auto' nor a tolerance such as 0.1"
            )
        config = ReplicationConfig(copy_cost=copy_cost)
        return None if replicate_experts == "off" else config
    return ReplicationConfig(tolerance=replicate_experts, copy_cost=copy_cost)


def check_combine(combine: str, layer: str = "") -> None:
    """Raises ConfigError for no such way to combine."""
    if combine not in COMBINE_MODES:
        raise ConfigError(f"combine={combine!r} is not one of {COMBINE_MODES}", layer=layer)


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of the exchange, the same on every rank of the expert group.

    transport: how rows travel, a name in `trimtab.dispatch.transports.TRANSPORTS`.
    combine: as in `trimtab.Dispatcher`.
    replicate_experts, copy_cost: as in `trimtab.ExpertParallel`.

    Raises:
        ConfigError: one of them does not exist.
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
        _ = self.replication

    @property
    def replication(self) -> ReplicationConfig | None:
        """The rule by which experts are replicated, None where none are."""
        return replication_config(self.replicate_experts, self.copy_cost)
