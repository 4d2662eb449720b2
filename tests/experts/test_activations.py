"""Each hand-written backward against autograd in float64, at the places where a clamp decides as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from experts.test_expert_module import TRUTH
from helpers.cut import cut
from trimtab.experts.activations import BY_NAME, GELU, Activation, ClampedSwiGLU, GeGLU
from trimtab.experts.recomputed import Recomputed, generators


def geglu_tanh(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def clamped_halves(pre: Tensor) -> Tensor:
    """DeepSeek-V4's."""
    gate, up = pre.chunk(2, -1)
    return torch.nn.functional.silu(cut(gate, 7.0)) * cut(up, 7.0, -7.0)


CASES: dict[str, tuple[Activation, Callable[[Tensor], Tensor]]] = {
    name: (make(), TRUTH[name]) for name, make in BY_NAME.items()
} | {
    "geglu_tanh": (GeGLU("tanh"), geglu_tanh),
    "clamped_halves": (ClampedSwiGLU(1.0, 7.0, 0.0, interleaved=False), clamped_halves),
    "gelu_tanh": (GELU("tanh"), lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
}


def test_a_device_s_own_generator_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function on a GPU draws from that one; it cannot be read while a graph is captured."""
    capturing, offset = False, torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _device: offset)
    host, device = generators(torch.device("cuda"))
    assert torch.equal(host, torch.get_rng_state())
    assert device is offset
    capturing = True
    assert generators(torch.device("cuda")) == []


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
    d_pre, d_params = ours.backward(pre.detach(), dh)
    true = truth(pre)
    (d_true,) = torch.autograd.grad(true, pre, dh)
    torch.testing.assert_close(h, true.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_pre, d_true, rtol=1e-12, atol=1e-12)
    assert list(d_params) == []
    again, back = ours.again(pre.detach())
    assert torch.equal(again, h)
    assert torch.equal(back(dh.clone())[0], d_pre)
    assert torch.equal(pre.detach(), before)


@pytest.mark.parametrize("name", CASES)
def test_nan_is_never_hidden(name: str) -> None:
    ours, _ = CASES[name]
    pre = torch.full((1, 4), float("nan"))
    h = ours.forward(pre)
    assert h.isnan().all()
    assert ours.backward(pre, torch.ones_like(h))[0].isnan().all()


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("hooked", [False, True])
def test_what_is_run_again_has_its_parameters_gradients_and_runs_no_hook_of_theirs(hooked: bool) -> None:
    """One that two modules share, one that is computed from another, and a frozen one."""
    norms = nn.Sequential(*(nn.RMSNorm(6, eps=1e-3, dtype=torch.float64) for _ in range(4)))
    norms[1].weight = norms[0].weight
    register_parametrization(norms[2], "weight", _Doubled())
    norms[3].weight.requires_grad_(False)
    shared, computed = norms[0].weight, norms[2].parametrizations.weight.original
    calls: list[Tensor] = []
    for p in (shared, computed) if hooked else ():
        p.register_hook(calls.append)
    ours, pre = Recomputed(norms, norms), torch.randn(5, 6, dtype=torch.float64)
    h = ours.forward(pre)
    d_pre, d_params = ours.backward(pre, torch.ones_like(h))
    assert calls == []
    leaf = pre.clone().requires_grad_()
    truth = torch.autograd.grad(norms(leaf).sum(), (leaf, shared, computed))
    found = {p.data_ptr(): d for p, d in zip(ours.params, d_params, strict=True)}
    for one, true in zip((d_pre, found[shared.data_ptr()], found[computed.data_ptr()]), truth, strict=True):
        torch.testing.assert_close(one, true, rtol=1e-12, atol=1e-12)
    assert norms[3].weight.data_ptr() not in found
