"""A transport on behalf of one layer: every exchange runs below a stack frame with the layer's name.

Legend: T local tokens, P ranks, C columns of the header, M rows sent, M' rows received.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trimtab.dispatch.layer_frame import layer_frame
from trimtab.dispatch.transport import Handshake, SplitSizes, Transport, guard_of


class NamedTransport:
    """`transport` for the layer called `layer`; see `trimtab.dispatch.layer_frame`. Adds less than a microsecond."""

    def __init__(self, transport: Transport, layer: str) -> None:
        self.rank, self.size, self.guard = transport.rank, transport.size, guard_of(transport)
        self._transport, self._frame = transport, layer_frame(layer)

    def handshake(self, message_PC: Tensor) -> Handshake:
        headers: Handshake = self._frame(self._transport.handshake, message_PC)
        return headers

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        received: list[Tensor] = self._frame(self._transport.dispatch, tensors, row_token_M, splits, tokens)
        return received

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        received: list[Tensor] = self._frame(self._transport.combine, tensors, splits, tokens)
        return received
