"""Activations of an expert, h = f(pre), with the backward taken from the pre-activations alone; each an operator too.

    swiglu           silu(gate) * up of [gate | up]                                 (Shazeer 2020, arXiv 2002.05202)
    geglu            gelu(gate) * up of [gate | up]                                 (the same)
    clamped_swiglu   (up + shift) * gate * sigmoid(alpha * gate), clamped           (gpt-oss, DeepSeek-V4)
    relu_squared     relu(x)^2                                                      (So et al. 2021, arXiv 2109.08668)
    gelu             gelu(x)                                                        (Hendrycks 2016, arXiv 1606.08415)

A new one is one row of `ACTIVATIONS`. Those that the C++ kernels know by name run there, others on the generic path.

Legend: n rows, I width of the pre-activations (2F with a gate, else F), F expert hidden dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import forward_of, once_differentiable
from trimtab.errors import ConfigError
from trimtab.operators import operator

Approximate = Literal["none", "tanh"]


class Activation(Protocol):
    """h = f(pre), row by row. gated: whether I is 2F."""

    gated: ClassVar[bool]

    def forward(self, pre_nI: Tensor) -> Tensor:
        """[n, I] -> [n, F]. Does not change its input."""

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> Tensor:
        """The gradient of `pre`."""


class _Pointwise(Activation):
    """s(pre), or with a gate s(gate) * up, gate first."""

    gated: ClassVar[bool] = False

    @abstractmethod
    def _s(self, x_nF: Tensor) -> Tensor: ...

    @abstractmethod
    def _s_backward(self, ds_nF: Tensor, x_nF: Tensor, out_nF: Tensor) -> None: ...

    def forward(self, pre_nI: Tensor) -> Tensor:
        if not self.gated:
            return self._s(pre_nI)
        gate, up = pre_nI.chunk(2, dim=-1)
        return self._s(gate).mul_(up)

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> Tensor:
        d_pre = torch.empty_like(pre_nI)
        if not self.gated:
            self._s_backward(dh_nF, pre_nI, d_pre)
            return d_pre
        gate, up = pre_nI.chunk(2, dim=-1)
        d_gate, d_up = d_pre.chunk(2, dim=-1)
        s_nF = self._s(gate)
        torch.mul(s_nF, dh_nF, out=d_up)
        self._s_backward(torch.mul(dh_nF, up, out=s_nF), gate, d_gate)
        return d_pre


class SwiGLU(_Pointwise):
    """silu(gate) * up, gate first."""

    gated = True

    def _s(self, x_nF: Tensor) -> Tensor:
        return torch.nn.functional.silu(x_nF)

    def _s_backward(self, ds_nF: Tensor, x_nF: Tensor, out_nF: Tensor) -> None:
        torch.ops.aten.silu_backward.grad_input(ds_nF, x_nF, grad_input=out_nF)


class GELU(_Pointwise):
    """gelu(x), no gate. `approximate` as in `torch.nn.functional.gelu`."""

    def __init__(self, approximate: Approximate = "none") -> None:
        self.approximate = approximate

    def _s(self, x_nF: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x_nF, approximate=self.approximate)

    def _s_backward(self, ds_nF: Tensor, x_nF: Tensor, out_nF: Tensor) -> None:
        torch.ops.aten.gelu_backward.grad_input(ds_nF, x_nF, approximate=self.approximate, grad_input=out_nF)


class GeGLU(GELU):
    """gelu(gate) * up, gate first."""

    gated = True


class ReluSquared(_Pointwise):
    """relu(x)^2, no gate."""

    def _s(self, x_nF: Tensor) -> Tensor:
        return torch.relu(x_nF).square_()

    def _s_backward(self, ds_nF: Tensor, x_nF: Tensor, out_nF: Tensor) -> None:
        torch.clamp(x_nF, min=0, out=out_nF).mul_(2).mul_(ds_nF)


class ClampedSwiGLU(Activation):
    """(up + shift) * gate * sigmoid(alpha * gate), both cut at `limit` first, the gate from above only.

    By default with gpt-oss's numbers. alpha 1 and shift 0 make it SwiGLU between limits. interleaved: gate and up
    alternate, as in transformers' gpt-oss.
    """

    gated: ClassVar[bool] = True

    def __init__(
        self, alpha: float = 1.702, limit: float = 7.0, shift: float = 1.0, *, interleaved: bool = False
    ) -> None:
        self.alpha, self.limit, self.shift, self.interleaved = alpha, limit, shift, interleaved

    def forward(self, pre_nI: Tensor) -> Tensor:
        gate, up = self._cut(pre_nI)
        return (self.alpha * gate).sigmoid_().mul_(gate).mul_(up.add_(self.shift))

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> Tensor:
        gate, up = self._cut(pre_nI)
        sigmoid = (self.alpha * gate).sigmoid_()
        d_pre = torch.empty_like(pre_nI)
        d_gate, d_up = self._parts(d_pre)
        torch.mul(gate, sigmoid, out=d_up).mul_(dh_nF)
        # d/dgate of gate * sigmoid(alpha * gate) is sigmoid * (1 + alpha * gate * (1 - sigmoid))
        gate.mul_(self.alpha).addcmul_(gate, sigmoid, value=-1).add_(1).mul_(sigmoid)
        torch.mul(gate, up.add_(self.shift), out=d_gate).mul_(dh_nF)
        del gate, up, sigmoid
        # What was cut has no slope; what lies at the limit has, as in torch's clamp before 2.15.
        gate, up = self._parts(pre_nI)
        d_gate.masked_fill_(gate > self.limit, 0)
        d_up.masked_fill_(up.abs() > self.limit, 0)
        return d_pre

    def _parts(self, pre_nI: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            return pre_nI[..., ::2], pre_nI[..., 1::2]
        gate, up = pre_nI.chunk(2, dim=-1)
        return gate, up

    def _cut(self, pre_nI: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self._parts(pre_nI)
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)


ACTIVATIONS: dict[str, Callable[[], Activation]] = {
    "swiglu": SwiGLU,
    "geglu": GeGLU,
    "geglu_tanh": lambda: GeGLU("tanh"),
    "clamped_swiglu": ClampedSwiGLU,
    "relu_squared": ReluSquared,
    "gelu": GELU,
    "gelu_tanh": lambda: GELU("tanh"),
}


def check_activation(name: str, of: str = "") -> None:
    """Raises ConfigError: there is no such activation. of: what it is of, for the message."""
    if name not in tuple(ACTIVATIONS):
        raise ConfigError(f"activation {name!r}{of} is not one of {tuple(ACTIVATIONS)}")


def clamped(alpha: float, limit: float, shift: float, *, interleaved: bool) -> str:
    """The word of `activation_of` for a `ClampedSwiGLU` with these numbers."""
    return f"clamped_swiglu {alpha!r} {limit!r} {shift!r} {int(interleaved)}"


@lru_cache(maxsize=64)
def activation_of(word: str) -> Activation:
    """The activation that an operator is told of by `word`: a name of `ACTIVATIONS`, or what `clamped` makes."""
    name, *numbers = word.split()
    if numbers:
        alpha, limit, shift, interleaved = map(float, numbers)
        return ClampedSwiGLU(alpha, limit, shift, interleaved=bool(interleaved))
    return ACTIVATIONS[name]()


def activate(pre: Tensor, word: str) -> Tensor:
    """An activation by its word, differentiable, with the pre-activations alone saved: [..., I] -> [..., F]."""
    h: Tensor = forward_of(_Activate, pre, word)
    return h


class _Activate(Function):
    @staticmethod
    def forward(ctx: Any, pre: Tensor, word: str) -> Tensor:
        ctx.save_for_backward(pre)
        ctx.word = word
        h: Tensor = activate_op(pre, word)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
        (pre,) = ctx.saved_tensors
        return activate_backward_op(pre, dh, ctx.word), None


def _fake(pre: Tensor, word: str) -> Tensor:
    width = pre.shape[-1]
    return pre.new_empty(*pre.shape[:-1], width // 2 if activation_of(word).gated else width)


activate_op = operator(
    "activate(Tensor pre, str activation) -> Tensor", lambda pre, word: activation_of(word).forward(pre), _fake
)
activate_backward_op = operator(
    "activate_backward(Tensor pre, Tensor dh, str activation) -> Tensor",
    lambda pre, dh, word: activation_of(word).backward(pre, dh), lambda pre, dh, word: torch.empty_like(pre),
)  # fmt: skip
