"""All-gather on a process group: every rank sees every row and keeps its own. For small groups and for checks.

Gloo's all-gather takes equal sizes only, so tables are padded to the longest; padding is never read.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.transport import Headers, Lanes


class AllGather:
    """Transport over `torch.distributed.all_gather_into_tensor`. Same results as `AllToAll`, bit for bit."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange_headers(self, headers_PC: Tensor) -> Headers:
        everyone = self._gather(headers_PC, self.size).tolist()
        return Headers(sent=everyone[self.rank], received=[row[self.rank] for row in everyone], everyone=everyone)

    def spread(self, table_TB: Tensor, row_token_M: Tensor, lanes: Lanes, tokens: tuple[int, ...]) -> Tensor:
        tables = self._gather(table_TB, max(tokens))
        indices = self._gather(row_token_M, max(sum(row) for row in lanes.everyone))
        mine = [indices[source, start:end] for source, (start, end) in enumerate(self._segments(lanes))]
        return torch.cat([tables[source].index_select(0, index) for source, index in enumerate(mine)])

    def move(self, rows_MB: Tensor, lanes: Lanes) -> Tensor:
        rows = self._gather(rows_MB, max(sum(row) for row in lanes.everyone))
        return torch.cat([rows[source, start:end] for source, (start, end) in enumerate(self._segments(lanes))])

    def _segments(self, lanes: Lanes) -> list[tuple[int, int]]:
        """Where in each rank's outgoing rows those for this rank lie."""
        cuts = [[0, *accumulate(row)] for row in lanes.everyone]
        return [(cut[self.rank], cut[self.rank + 1]) for cut in cuts]

    def _gather(self, rows: Tensor, longest: int) -> Tensor:
        """Each rank's rows, padded to `longest`: [P, longest, …]."""
        padded = rows.new_empty(longest, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        gathered = rows.new_empty(self.size * longest, *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        return gathered.view(self.size, longest, *rows.shape[1:])
