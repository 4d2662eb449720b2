"""One pass of the expert MLP: what it reads, where it writes, and its two products.

Legend: M rows, K slots per row, R expert rows, D model dim, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trimtab.experts.activations import Activation, activation_of
from trimtab.experts.matrix import blocks_of
from trimtab.experts.plan import ExpertPlan, slot_weights
from trimtab.experts.product import Product
from trimtab.experts.sink import Sink
from trimtab.experts.weight import GroupedWeight
from trimtab.kernels.api import Backend, Block
from trimtab.kernels.rows import gather_padded


@dataclass(slots=True, eq=False)
class Pass:
    """What a pass reads and where it writes.

    x: [M, D] in the dtype that is computed in. w: [M, K] in float32 or wider. up, down: in the model's dtype, `filled`.
    word: the activation's. seed: [] int64, of dropout's masks. low_precision: a recipe's products with up and with
    down; the plan's segments are aligned for them. waits: see `Product`. The pairs are of up and of down:

    u: see `Product.u`. v: [R, r] scale * d b, where gradients come later. sinks: where gradients go.
    """

    x: Tensor
    w: Tensor
    up: GroupedWeight
    down: GroupedWeight
    word: str
    plan: ExpertPlan
    kernels: Backend
    seed: Tensor | None = None
    low_precision: tuple[Any, Any] | None = None
    u: Sequence[Tensor | None] = (None, None)
    v: Sequence[Tensor | None] = (None, None)
    sinks: tuple[Sink | None, Sink | None] = (None, None)
    waits: list[Callable[[], None]] | None = None
    up_product: Product = field(init=False)
    down_product: Product = field(init=False)
    w_R1: Tensor = field(init=False)

    @property
    def activation(self) -> Activation:
        return activation_of(self.word)

    @property
    def adapted(self) -> bool:
        """Whether up or down has an adapter."""
        return self.up.lora is not None or self.down.lora is not None

    def thin_rows(self) -> list[Tensor]:
        """Memory [R, r] for each adapter."""
        rows, offsets_e = self.plan.row_R.shape[0], self.plan.offsets_e
        ranks = [weight.lora.rank for weight in (self.up, self.down) if weight.lora is not None]
        return [self.kernels.empty_rows(rows, rank, self.x.dtype, offsets_e) for rank in ranks]

    def placed(self, thin: Sequence[Tensor]) -> list[Tensor | None]:
        """Such memory by its place."""
        rest = iter(thin)
        return [next(rest) if weight.lora is not None else None for weight in (self.up, self.down)]

    def wants(self, wanted: Sequence[bool]) -> None:
        """Say which gradients are asked for, of up's tensors and then of down's."""
        count = len(self.up.tensors())
        self.sinks = Sink(wanted[:count]), Sink(wanted[count:])

    def write_to(self, out: Iterable[Tensor], wanted: Sequence[bool], adds: Iterable[bool]) -> None:
        """Take where they go from the lists that operators take."""
        if self.sinks == (None, None):
            self.wants(wanted)
        buffers, flags = iter(out), iter(adds)
        for sink in self.sinks:
            assert sink is not None
            sink.fill(buffers, flags)

    def begin(self) -> tuple[Product, Product, bool]:
        """The two products, and whether hidden rows are weighted: else sums of rows are."""
        low, dtype = self.low_precision or (None, None), self.x.dtype
        each = {"kernels": self.kernels, "dtype": dtype, "offsets_e": self.plan.offsets_e, "waits": self.waits}
        seed = None if self.seed is None else int(self.seed)
        other = None if seed is None else seed ^ (1 << 61)
        up = Product(self.up, u=self.u[0], seed=seed, sink=self.sinks[0], low_precision=low[0], **each)  # type: ignore[arg-type]
        w_R1 = self.w_R1 = slot_weights(self.w, self.plan).to(up.wide)
        folded = low[0] is not None or not (up.direct and self.kernels.weighs_sums)
        down = Product(
            self.down, w_R1=w_R1, weighted=folded, u=self.u[1], seed=other, sink=self.sinks[1], low_precision=low[1],
            **each,  # type: ignore[arg-type]
        )  # fmt: skip
        self.up_product, self.down_product = up, down
        return up, down, folded

    def blocks(self) -> Iterator[Block]:
        rows, low = self.plan.row_R.shape[0], self.low_precision is not None
        return blocks_of(
            self.kernels, self.plan.offsets_e, rows, self.x.dtype, self.up, self.down, low_precision=low
        )  # fmt: skip

    def gather(self, x: Tensor, block: Block) -> Tensor:
        index_R = self.plan.row_R[block.rows]
        if self.low_precision is not None:
            return gather_padded(x, index_R)
        return self.kernels.gather(x, index_R).to(self.up_product.wide)

    def rows_of(self, width: int) -> Tensor | None:
        """Where blocks leave what is for all rows; None where there is one block, whose results these are."""
        if self.kernels.whole or self.low_precision is not None:
            return None
        return self.kernels.empty_rows(self.plan.row_R.shape[0], width, self.x.dtype, self.plan.offsets_e)
