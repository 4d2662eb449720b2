"""A transport on behalf of one layer: every exchange runs below a stack frame with the layer's name.

Legend: T local tokens, P ranks, C columns of the header, M rows sent, M' rows received.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trimtab.dispatch.layer_frame import layer_frame
from trimtab.dispatch.transport import Headers, Lanes, Transport, guard_of


class NamedTransport:
    """`transport` for the layer called `layer`; see `trimtab.dispatch.layer_frame`. Adds less than a microsecond."""

    def __init__(self, transport: Transport, layer: str) -> None:
        self.rank, self.size, self.guard = transport.rank, transport.size, guard_of(transport)
        self._transport, self._frame = transport, layer_frame(layer)

    def exchange_headers(self, headers_PC: Tensor) -> Headers:
        headers: Headers = self._frame(self._transport.exchange_headers, headers_PC)
        return headers

    def spread(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, lanes: Lanes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        received: list[Tensor] = self._frame(self._transport.spread, tensors, row_token_M, lanes, tokens)
        return received

    def move(self, tensors: Sequence[Tensor], lanes: Lanes, tokens: tuple[int, ...]) -> list[Tensor]:
        received: list[Tensor] = self._frame(self._transport.move, tensors, lanes, tokens)
        return received
