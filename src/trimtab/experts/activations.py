"""Activations between the two GEMMs of an expert, with the backward taken from the pre-activations alone.

    SwiGLU          silu(gate) * up of [gate | up]                                  (Shazeer 2020, arXiv 2002.05202)
    GeGLU           gelu(gate) * up of [gate | up]                                  (the same)
    ClampedSwiGLU   (up + shift) * gate * sigmoid(alpha * gate), clamped            (gpt-oss, DeepSeek-V4)
    ReluSquared     relu(x)^2                                                       (So et al. 2021, arXiv 2109.08668)
    GELU            gelu(x)                                                         (Hendrycks 2016, arXiv 1606.08415)

A function of one's own is run again for its backward: see `recomputed`.

Legend: n rows, I width of the pre-activations (2F with a gate, else F), F expert hidden dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from trimtab.kernels.hidden import Gradients

Approximate = Literal["none", "tanh"]


class Activation(Protocol):
    """h = f(pre). Parameters of f, if any, are listed so that their gradients come out as well."""

    params: tuple[Tensor, ...]

    def forward(self, pre_nI: Tensor) -> Tensor:
        """[n, I] -> [n, F]. Does not change its input."""
        ...

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> Gradients: ...

    def again(self, pre_nI: Tensor) -> tuple[Tensor, Callable[[Tensor], Gradients]]:
        """`forward`, and `backward` of `pre` with what of it the two share: of dh [n, F], called once at most."""
        return self.forward(pre_nI), partial(self.backward, pre_nI)


class BuiltIn(Activation, Protocol):
    """One that is known by a name. gated: whether I is 2F."""

    gated: ClassVar[bool]


class _Gated(Activation):
    """s(gate) * up, gate first."""

    gated: ClassVar[bool] = True
    params: tuple[Tensor, ...] = ()

    @abstractmethod
    def _s(self, gate_nF: Tensor) -> Tensor: ...

    @abstractmethod
    def _s_backward(self, ds_nF: Tensor, gate_nF: Tensor, out_nF: Tensor) -> None: ...

    def forward(self, pre_nI: Tensor) -> Tensor:
        gate, up = pre_nI.chunk(2, dim=-1)
        return self._s(gate).mul_(up)

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> Gradients:
        return self._backward(pre_nI, self._s(pre_nI.chunk(2, dim=-1)[0]), dh_nF)

    def again(self, pre_nI: Tensor) -> tuple[Tensor, Callable[[Tensor], Gradients]]:
        gate, up = pre_nI.chunk(2, dim=-1)
        s = self._s(gate)
        return s * up, partial(self._backward, pre_nI, s)

    def _backward(self, pre_nI: Tensor, s_nF: Tensor, dh_nF: Tensor) -> Gradients:
        """`s` is not the caller's any more."""
        gate, up = pre_nI.chunk(2, dim=-1)
        d_pre = torch.empty_like(pre_nI)
        d_gate, d_up = d_pre.chunk(2, dim=-1)
        torch.mul(s_nF, dh_nF, out=d_up)
        self._s_backward(torch.mul(dh_nF, up, out=s_nF), gate, d_gate)
        return d_pre, ()


class SwiGLU(_Gated):
    """silu(gate) * up, gate first."""

    def _s(self, gate_nF: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate_nF)

    def _s_backward(self, ds_nF: Tensor, gate_nF: Tensor, out_nF: Tensor) -> None:
        torch.ops.aten.silu_backward.grad_input(ds_nF, gate_nF, grad_input=out_nF)


class GeGLU(_Gated):
    """gelu(gate) * up, gate first. `approximate` as in `torch.nn.functional.gelu`."""

    def __init__(self, approximate: Approximate = "none") -> None:
        self.approximate = approximate

    def _s(self, gate_nF: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate_nF, approximate=self.approximate)

    def _s_backward(self, ds_nF: Tensor, gate_nF: Tensor, out_nF: Tensor) -> None:
        torch.ops.aten.gelu_backward.grad_input(ds_nF, gate_nF, approximate=self.approximate, grad_input=out_nF)


class ClampedSwiGLU(Activation):
    """(up + shift) * gate * sigmoid(alpha * gate), both cut at `limit` first, the gate from above only.

    By default with gpt-oss's numbers. alpha 1 and shift 0 make it SwiGLU between limits. interleaved: gate and up
    alternate, as in transformers' gpt-oss.
    """

    gated: ClassVar[bool] = True
    params: tuple[Tensor, ...] = ()

    def __init__(
        self, alpha: float = 1.702, limit: float = 7.0, shift: float = 1.0, *, interleaved: bool = False
    ) -> None:
        self.alpha, self.limit, self.shift, self.interleaved = alpha, limit, shift, interleaved

    def forward(self, pre_nI: Tensor) -> Tensor:
        gate, up = self._cut(pre_nI)
        return (self.alpha * gate).sigmoid_().mul_(gate).mul_(up.add_(self.shift))

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> Gradients:
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
        return d_pre, ()

    def _parts(self, pre_nI: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            return pre_nI[..., ::2], pre_nI[..., 1::2]
        gate, up = pre_nI.chunk(2, dim=-1)
        return gate, up

    def _cut(self, pre_nI: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self._parts(pre_nI)
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)


class ReluSquared(Activation):
    """relu(x)^2, no gate."""

    gated: ClassVar[bool] = False
    params: tuple[Tensor, ...] = ()

    def forward(self, pre_nI: Tensor) -> Tensor:
        return torch.relu(pre_nI).square_()

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> Gradients:
        return torch.relu(pre_nI).mul_(2).mul_(dh_nF), ()


class GELU(Activation):
    """gelu(x), no gate. `approximate` as in `torch.nn.functional.gelu`."""

    gated: ClassVar[bool] = False
    params: tuple[Tensor, ...] = ()

    def __init__(self, approximate: Approximate = "none") -> None:
        self.approximate = approximate

    def forward(self, pre_nI: Tensor) -> Tensor:
        return torch.nn.functional.gelu(pre_nI, approximate=self.approximate)

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> Gradients:
        return torch.ops.aten.gelu_backward(dh_nF, pre_nI, approximate=self.approximate), ()


BY_NAME: dict[str, Callable[[], BuiltIn]] = {
    "swiglu": SwiGLU,
    "geglu": GeGLU,
    "clamped_swiglu": ClampedSwiGLU,
    "relu_squared": ReluSquared,
    "gelu": GELU,
}


def spelled(word: str) -> BuiltIn:
    """The activation that `word` spells: a name, one of GELU's that ends in _tanh, or "clamped_swiglu" and its alpha,
    limit, shift and 1 or 0 for interleaved. An operator of `torch.compile` takes no more of one than that."""
    name, *numbers = word.split()
    if numbers:
        alpha, limit, shift, interleaved = map(float, numbers)
        return ClampedSwiGLU(alpha, limit, shift, interleaved=bool(interleaved))
    if name in ("geglu_tanh", "gelu_tanh"):
        return GeGLU("tanh") if name == "geglu_tanh" else GELU("tanh")
    return BY_NAME[name]()
