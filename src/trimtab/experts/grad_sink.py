"""Where the gradients of a call's tensors go: to autograd or into `main_grad`, now or later.

buffers()    what kernels write or add to
close()      what autograd gets for each tensor, once they have
deliver()    the same beside its tensor, where that is later
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.experts.weight import Form
from trimtab.experts.weight_grad import Defer, MainGradMode, WeightGradient

MODES = get_args(MainGradMode)


@dataclass(slots=True)
class GradSink:
    """main_grad: where the gradients of values go, see `trimtab.experts.weight_grad`; biases and factors always have
    ordinary ones. defer: takes the work of all of them at each backward, as `DelayedGradients.add`.

    Raises:
        ConfigError: no such mode.
    """

    main_grad: MainGradMode = "off"
    defer: Defer | None = None

    def __post_init__(self) -> None:
        if self.main_grad not in MODES:
            raise ConfigError(f"main_grad={self.main_grad!r} is not one of {MODES}", phase="experts")

    @property
    def ordinary(self) -> bool:
        return self.main_grad == "off" and self.defer is None


class FactorGradient:
    """The gradient of a LoRA factor: made in float32 at least, and laid as the factor is."""

    adds = silent = False

    def __init__(self, param: Tensor, empty_like: Callable[..., Tensor]) -> None:
        shape, dtype = param.new_empty(()).expand(param.shape), torch.promote_types(param.dtype, torch.float32)
        self.param, self.buffer = param, empty_like(shape, dtype=dtype)

    def close(self) -> Tensor:
        from trimtab.experts.lora import lying_as

        return lying_as(self.buffer.to(self.param.dtype), self.param)


class Gradients:
    """Of one microbatch's tensors; None where nobody wants one.

    Args:
        params: the tensors; those with a `main_grad` themselves.
        kinds: what each is, and what errors call it, see `kinds_of`.
        wanted: which of them.
        main_grad: where those of values go.
        empty_like: makes a buffer.
    """

    def __init__(
        self, params: Sequence[Tensor], kinds: Sequence[tuple[str, str]], wanted: Sequence[bool],
        main_grad: MainGradMode, empty_like: Callable[..., Tensor],
    ) -> None:  # fmt: skip
        self.each: list[WeightGradient | FactorGradient | None] = []
        for param, (kind, name), want in zip(params, kinds, wanted, strict=True):
            made: WeightGradient | FactorGradient | None = None
            if want and kind == "factor":
                made = FactorGradient(param, empty_like)
            elif want:
                made = WeightGradient(param, main_grad if kind == "value" else "off", name, empty_like)
            self.each.append(made)

    def buffers(self) -> tuple[list[Tensor], list[bool], list[bool]]:
        """As an operator takes them: those that are written, which of all these are, and which are added to."""
        found = [gradient for gradient in self.each if gradient is not None]
        return [g.buffer for g in found], [g is not None for g in self.each], [g.adds for g in found]

    def close(self) -> list[Tensor | None]:
        """What autograd gets for each."""
        return [None if g is None or g.silent else g.close() for g in self.each]

    def deliver(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors that have one, each with what autograd gets for it."""
        return [(g.param, g.close()) for g in self.each if g is not None and not g.silent]


def kinds_of(form: str, name: str) -> list[tuple[str, str]]:
    """The kind of each of `GroupedWeight.tensors`, and what errors call it, of a weight of this form and name."""
    if form in ("0 0 0 ", "0 0 1 "):  # as nearly always: one tensor of values
        return [("value", name)]
    f = Form.read(form)

    def each(kind: str, count: int, own: str) -> list[tuple[str, str]]:
        return [(kind, own)] if count == 1 else [(kind, f"{own}{i}") for i in range(count)]

    found = [("value", name)] if f.values == 0 else [("value", f"{name}{i}") for i in range(f.values)]
    found += each("bias", f.biases, f"{name}_bias")
    found += [("scale", f"{name}_scales")] if f.format else []
    return found if f.lora is None else [*found, ("factor", f"{name}_a"), ("factor", f"{name}_b")]
