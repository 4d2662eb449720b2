"""One call of an expert MLP: what goes in that is not differentiated, and where its weight gradients go.

Legend: e local experts, D model dim, I width of the pre-activations, F expert hidden dim, R expert rows, A any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.autograd import computed_in
from trimtab.experts.activations import Activation, activation_of
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.quantized import Codes, packed
from trimtab.experts.weight_grad import Defer, MainGradMode, WeightGradient, anchor
from trimtab.kernels.api import Backend
from trimtab.kernels.tensor_checks import no_values

if TYPE_CHECKING:
    from trimtab.experts.adapters import Adapters
    from trimtab.experts.lowered import LoweredProducts


@dataclass(kw_only=True)
class ExpertWeights:
    """The parameters of all local experts.

    up: [e, 2, F, D] with a gate (gate 0, up 1) or [e, I, D], and down: [e, D, F]; with `transposed` [e, D, I] and
    [e, F, D]. Biases: as up without D, and [e, D]. codes: what up and down, [e, out, in] then, are codes of.
    owners: of weights that live for one call, those in the order of `each` that say where their gradients go and have
    their shapes; a backward may keep these, and no others.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    transposed: bool = False
    adapters: Adapters | None = None
    codes: Codes | None = None
    owners: tuple[Tensor | None, ...] | None = None

    def lasting(self) -> ExpertWeights:
        """What a backward may keep of them beside what autograd saves."""
        if self.owners is None:
            return self
        up, down, *biases = self.owners
        assert up is not None
        assert down is not None
        return replace(
            self, up=up, down=down, up_bias=biases[0], down_bias=biases[1], adapters=None, codes=None, owners=None
        )

    @property
    def computed_in(self) -> torch.dtype:
        return computed_in(self.up, None if self.codes is None else self.codes.dtype)

    @property
    def each(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.up, self.down, self.up_bias, self.down_bias

    @property
    def width(self) -> int:
        """I."""
        return self.up.shape[2] if self.transposed else self.up.shape[1:-1].numel()

    @property
    def hidden(self) -> int:
        """F."""
        form = "" if self.codes is None else self.codes.format
        return self.down.shape[1] if self.transposed else self.down.shape[2] * packed(form)


@dataclass(kw_only=True)
class ExpertCall:
    """What is not differentiated.

    word: names the activation, see `activation_of`. low: a recipe's products with up and with down.
    name: of the kernels, in operators. keep: whether a backward may come. defer: takes delayed weight gradients.
    trained: where they are delayed, which parameters wanted a gradient when the call was made.
    weights: `ExpertWeights.lasting`.
    """

    plan: ExpertPlan
    word: str
    kernels: Backend | None
    name: str
    weights: ExpertWeights
    main_grad: MainGradMode
    keep: bool
    defer: Defer | None
    trained: tuple[bool, ...]
    low: tuple[LoweredProducts, LoweredProducts] | None = None

    @property
    def activation(self) -> Activation:
        return activation_of(self.word)

    def inputs(self, weights: ExpertWeights, x: Tensor) -> tuple[Tensor | None, ...]:
        """The parameters as autograd may meet them, and what stands in for those it may not."""
        if self.defer is None:
            return (*weights.each, None)
        return (*(None if p is None else p.detach() for p in weights.each), anchor(x, any(self.trained)))

    def delayed_reads(self, x: Tensor, *of_down: Tensor) -> list[Tensor]:
        """Of the rows, and of what the gradients of down and its bias are made of, what delayed work will read."""
        up, down, _, down_bias = self.trained
        return [*([x] if up else []), *(of_down if down or down_bias else [])]

    def gradients(self, needs: Sequence[bool]) -> ExpertGradients:
        """Of the parameters that autograd needs them for, or of all that are trained where they are delayed."""
        return ExpertGradients(self, needs if self.defer is None else self.trained)


class ExpertGradients:
    """The gradients of up, down and their biases for one microbatch; None where nobody wants one.

    The parameters themselves say where `main_grad` is; biases always have ordinary gradients.
    """

    def __init__(self, call: ExpertCall, wanted: Sequence[bool]) -> None:
        modes: tuple[MainGradMode, ...] = (call.main_grad, call.main_grad, "off", "off")
        names = ("up", "down", "up_bias", "down_bias")
        empty_like = torch.empty_like if call.kernels is None else call.kernels.empty_like
        self.up, self.down, self.up_bias, self.down_bias = self.each = tuple(
            WeightGradient(param, mode, name, empty_like) if want and param is not None else None
            for param, mode, name, want in zip(call.weights.each, modes, names, wanted, strict=False)
        )

    def buffers(self) -> tuple[list[Tensor], list[bool], list[bool]]:
        """As an operator takes them: those that are written, which of the four these are, and which are added to."""
        found = [gradient for gradient in self.each if gradient is not None]
        return [g.buffer for g in found], [g is not None for g in self.each], [g.adds for g in found]

    def close(self) -> list[Tensor | None]:
        """What autograd gets for up, down and their biases."""
        return [None if gradient is None else gradient.close() for gradient in self.each]

    def deliver(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that have one, each with what autograd gets for it."""
        return [(gradient.param, gradient.close()) for gradient in self.each if gradient is not None]


def joined(weight: Tensor) -> Tensor:
    """A weight [e, 2, F, A] of a gate and up as [e, 2F, A]; others as they are."""
    return weight.flatten(1, 2) if weight.ndim == 4 else weight


def cast_weights(
    up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, plan: ExpertPlan, like: Tensor,
    kernels: Backend,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The parameters as they are multiplied, up [e, I, D] (or turned) and its bias [e, I]: themselves, or copies in the
    dtype of `like` for one pass, of the experts that have rows."""
    up, up_bias = joined(up), None if up_bias is None else up_bias.flatten(1)
    if up.dtype == down.dtype == like.dtype:
        return up, down, up_bias, down_bias
    runs = with_rows(plan.offsets_e)
    up, down = (cast(weight, like.dtype, kernels, runs) for weight in (up, down))
    up_bias, down_bias = (bias if bias is None else bias.to(like.dtype) for bias in (up_bias, down_bias))
    return up, down, up_bias, down_bias


def with_rows(offsets_e: Tensor) -> list[slice] | None:
    """The experts whose segments have rows, in runs of neighbours; None where the host cannot tell at once."""
    if offsets_e.device.type != "cpu" or no_values(offsets_e.device):
        return None
    runs: list[slice] = []
    for expert in offsets_e.diff().nonzero().flatten().tolist():
        if runs and runs[-1].stop == expert:
            runs[-1] = slice(runs[-1].start, expert + 1)
        else:
            runs.append(slice(expert, expert + 1))
    return runs


def cast(weight_eAB: Tensor, dtype: torch.dtype, kernels: Backend, runs: Sequence[slice] | None = None) -> Tensor:
    """The weight itself where it has `dtype`, else a copy: of the experts in `runs`, the others' memory not set."""
    if weight_eAB.dtype == dtype:
        return weight_eAB
    made = kernels.empty_like(weight_eAB, dtype)
    for run in [slice(None)] if runs is None else runs:
        made[run].copy_(weight_eAB[run])
    return made
