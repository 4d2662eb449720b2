"""One call of an expert MLP: what goes in that is not differentiated, and where its weight gradients go.

Legend: e local experts, D model dim, I width of the pre-activations, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from trimtab.experts.activations import Activation, SwiGLU
from trimtab.experts.casting import cast, with_rows
from trimtab.experts.delayed import Defer, anchor
from trimtab.experts.main_grad import MainGradMode
from trimtab.experts.per_group import Gradients, joined
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.products import Products
from trimtab.kernels.compiled import at_once
from trimtab.kernels.grouped import Block, Kernels

TOGETHER, AT_ONCE = 256, 2048
"""Rows in all of the experts that may share a block: the calls between their products cost more than the work. The
second where one call multiplies all of them."""


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The parameters of all local experts.

    up: [e, 2, F, D] with a gate (gate 0, up 1) or [e, I, D], and down: [e, D, F]; with `transposed` [e, D, I] and
    [e, F, D]. Biases: as up without D, and [e, D].
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    transposed: bool = False

    @property
    def each(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.up, self.down, self.up_bias, self.down_bias

    @property
    def shape(self) -> tuple[int, int]:
        """(D, F)."""
        return self.up.shape[1 if self.transposed else -1], self.down.shape[1 if self.transposed else 2]

    @property
    def width(self) -> int:
        """I."""
        return self.up.shape[2] if self.transposed else self.up.shape[1:-1].numel()


@dataclass(frozen=True, kw_only=True)
class ExpertMath:
    """What an expert computes: its activation, the norm behind it if there is one, and where it is weighted."""

    activation: Activation = field(default_factory=SwiGLU)
    post_norm: Activation | None = None
    weights: Literal["experts", "combine"] = "experts"

    @property
    def folded(self) -> bool:
        """Whether the routing weight is taken into the hidden rows."""
        return self.weights == "experts" and self.post_norm is None

    @property
    def params(self) -> tuple[Tensor, ...]:
        return self.activation.params + (() if self.post_norm is None else self.post_norm.params)


@dataclass(frozen=True)
class TwoProducts:
    """A recipe's products of one call with up, and with down."""

    up: Products
    down: Products


@dataclass(frozen=True, kw_only=True)
class ExpertCall:
    """What is not differentiated.

    dtype: what is multiplied in: the parameters', or autocast's.
    keep: whether a backward may come. defer: takes delayed weight gradients. products: of a recipe, if there is one.
    trained: where they are delayed, which parameters wanted a gradient when the call was made.
    pre: [at least R, I] in `dtype`, into whose first R rows the forward puts the pre-activations that
        the backward reads, where they must lie in one tensor; None where each block may keep its own.
    """

    plan: ExpertPlan
    math: ExpertMath
    kernels: Kernels
    weights: ExpertWeights
    dtype: torch.dtype
    main_grad: MainGradMode
    keep: bool
    defer: Defer | None = None
    trained: tuple[bool, ...] = ()
    products: TwoProducts | None = None
    pre: Tensor | None = None

    def blocks(self) -> Iterator[Block]:
        up, down, plan = self.weights.up, self.weights.down, self.plan
        most = AT_ONCE if at_once(self.kernels, joined(up), down, dtype=self.dtype) else TOGETHER
        return self.kernels.blocks(plan.offsets_e, plan.row_R.shape[0], most, self.dtype)

    def by_row(self, weight: Tensor) -> Tensor:
        """A parameter, or a part of one, as [e, in, out]."""
        return weight if self.weights.transposed else weight.transpose(1, 2)

    def inputs(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """The parameters as autograd may meet them, and what stands in for those it may not."""
        if self.defer is None:
            return (*self.weights.each, None)
        return (*(None if p is None else p.detach() for p in self.weights.each), anchor(x, any(self.trained)))

    def cast(
        self, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, *, reads_up: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The parameters as they are multiplied, up [e, I, D]: themselves, or copies in autocast's dtype for one pass.

        reads_up: whether the pass multiplies by `up`.
        """
        up = joined(up)
        up_bias = None if up_bias is None else up_bias.flatten(1)
        if up.dtype == down.dtype == self.dtype:
            return up, down, up_bias, down_bias
        runs = with_rows(self.plan.offsets_e) if self.products is None else None  # a recipe's scales want them all
        up = cast(up, self.dtype, self.kernels, runs) if reads_up else up
        down = cast(down, self.dtype, self.kernels, runs)
        up_bias, down_bias = (b if b is None else b.to(self.dtype) for b in (up_bias, down_bias))
        return up, down, up_bias, down_bias

    def wanted(self, needs: Sequence[bool]) -> Sequence[bool]:
        """Whether up, down and their biases get gradients: as autograd needs them, or all that may where delayed."""
        return needs if self.defer is None else self.trained

    def delayed_reads(self, x: Tensor, *of_down: Tensor) -> list[Tensor]:
        """Of the rows, and of what the gradients of down and its bias are made of, what delayed work will read."""
        up, down, _, down_bias = self.trained
        return [*([x] if up else []), *(of_down if down or down_bias else [])]

    def gradients(self, needs: Sequence[bool]) -> ExpertGradients:
        """For those that are wanted."""
        return ExpertGradients(self, self.wanted(needs))


class ExpertGradients:
    """The gradients of up, down and their biases for one microbatch; None where nobody wants one.

    The parameters themselves say where `main_grad` is; biases always have ordinary gradients.
    """

    def __init__(self, call: ExpertCall, wanted: Sequence[bool]) -> None:
        modes: tuple[MainGradMode, ...] = (call.main_grad, call.main_grad, "off", "off")
        names = ("up", "down", "up_bias", "down_bias")
        self._call = call
        self.up, self.down, self.up_bias, self.down_bias = (
            Gradients([param], True, mode, name, call.kernels.empty_like) if want and param is not None else None
            for param, mode, name, want in zip(call.weights.each, modes, names, wanted, strict=False)
        )

    def weight(self, into: Gradients | None, a_RA: Tensor, b_RB: Tensor, block: Block) -> None:
        """a^T b of one block."""
        if into is not None:
            with into.block(block.experts) as (out, add):
                self._call.kernels.grouped_wgrad(a_RA, b_RB, block, self._call.by_row(out), add=add)

    def bias(self, into: Gradients | None, rows_RA: Tensor, block: Block) -> None:
        """The sum of one block's rows."""
        if into is not None:
            with into.block(block.experts) as (out, _):
                out.copy_(self._call.kernels.grouped_sum(rows_RA, block).view_as(out))

    def close(self) -> list[Tensor | None]:
        """What autograd gets for up, down and their biases."""
        each = (self.up, self.down, self.up_bias, self.down_bias)
        return [None if gradient is None else gradient.close()[0] for gradient in each]

    def deliver(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that have one, and what autograd gets for each."""
        pairs = zip(self._call.weights.each, self.close(), strict=True)
        found = [(param, value) for param, value in pairs if param is not None and value is not None]
        return [param for param, _ in found], [value for _, value in found]
