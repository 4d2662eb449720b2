"""Options of the exchange, which every integration takes: checked once, where they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.dispatch.replication.plan import COPY_COST, Replication, ReplicationConfig, replication_config
from trimtab.errors import ConfigError

CombineMode = Literal["sum", "ordered"]
COMBINE_MODES: tuple[CombineMode, ...] = ("sum", "ordered")


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
