"""Each hand-written backward against autograd in float64, at the places where a clamp decides as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close, cut
from helpers.pair_truth import TRUTHS
from helpers.pairs import Pair, Subject
from trimtab.errors import ConfigError
from trimtab.experts.activations import ACTIVATIONS, Activation, activation_of, clamped
from trimtab.experts.module import ExpertMLP


def clamped_halves(pre: Tensor) -> Tensor:
    """DeepSeek-V4's."""
    gate, up = pre.chunk(2, -1)
    return torch.nn.functional.silu(cut(gate, 7.0)) * cut(up, 7.0, -7.0)


CASES: dict[str, tuple[Activation, Callable[[Tensor], Tensor]]] = {
    name: (activation_of(name), TRUTHS[name]) for name in ACTIVATIONS
} | {"clamped_halves": (activation_of(clamped(1.0, 7.0, 0.0, interleaved=False)), clamped_halves)}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_backward_equals_autograd(name: str, rows: int) -> None:
    ours, truth = CASES[name]
    g = torch.Generator().manual_seed(0)
    pre = (5 * torch.randn(rows, 20, generator=g, dtype=torch.float64)).requires_grad_()
    with torch.no_grad():
        pre[:1, :6] = torch.tensor([7.0, 7.0, -7.0, -7.0, 0.0, 0.0])  # at the limits and at the kink
        pre[:1, 10:16] = torch.tensor([7.0, -7.0, 7.0, 0.0, -7.0, 0.0])  # and of the halves of a row
    before = pre.detach().clone()
    h = ours.forward(pre.detach())
    dh = torch.randn(h.shape, generator=g, dtype=torch.float64)
    d_pre = ours.backward(pre.detach(), dh)
    true = truth(pre)
    (d_true,) = torch.autograd.grad(true, pre, dh)
    torch.testing.assert_close(h, true.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_pre, d_true, rtol=1e-12, atol=1e-12)
    assert torch.equal(pre.detach(), before)


@pytest.mark.parametrize("name", CASES)
def test_nan_is_never_hidden(name: str) -> None:
    ours, _ = CASES[name]
    pre = torch.full((1, 4), float("nan"))
    h = ours.forward(pre)
    assert h.isnan().all()
    assert ours.backward(pre, torch.ones_like(h)).isnan().all()


class SoftplusGate(Activation):
    """softplus(gate) * up."""

    gated = True

    def forward(self, pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, -1)
        return torch.nn.functional.softplus(gate) * up

    def backward(self, pre: Tensor, dh: Tensor) -> Tensor:
        gate, up = pre.chunk(2, -1)
        return torch.cat((dh * up * gate.sigmoid(), dh * torch.nn.functional.softplus(gate)), -1)


def test_an_activation_from_outside_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts train with it, every gradient as autograd's, and who misspells it is told which there are."""
    monkeypatch.setitem(ACTIVATIONS, "softplus_gate", SoftplusGate)
    monkeypatch.setitem(TRUTHS, "softplus_gate", SoftplusGate().forward)
    subject = Subject(Pair(module="mlp", weights="bias", activation="softplus_gate", dtype=torch.float64))
    truth = subject.truth()
    for name, value in subject.run(subject.trained).items():
        assert value is not None
        assert_close(value, truth[name], 1e-12, name)
    with pytest.raises(ConfigError, match=r"activation 'softplus' is not one of .*'softplus_gate'"):
        ExpertMLP(4, 6, 5, activation="softplus")
