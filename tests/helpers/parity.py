"""One run of a tiny model and what it left behind: output, loss, gradients, routing. And how to compare two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .families import build_model, experts_modules, forward, sample_batch

# These compute in float32 inside their experts whatever the model's dtype, each in a place of its own, so that
# float64 shows float32 rounding: the gate, the activation, the norm, the sum over slots, everything. The relative error
# that is rounding in float64; inkling2_loop's queries cancel as well, and transformers' batched_mm is 1.1e-5 from its
# loop there.
FLOAT32_INSIDE = dict.fromkeys(("beam", "inkling2", "muse_spark", "nemotron_h", "openai_privacy_filter"), 4e-6)
FLOAT32_INSIDE["inkling2_loop"] = 2e-5

# Gradients of hyper-connection scales and of decay rates are sums that cancel to a thousandth of their terms: in
# float32 transformers' own implementations differ by up to 2e-5 there. Float64 is what judges these families. The
# relative error that is rounding in float32.
CANCELLING = dict.fromkeys(
    ("bailing_hybrid", "deepseek_v4", "glm5_next", "hy_v4", "qwen3_5_moe", "qwen3_next", "qwen4_exp"), 1e-4
)
CANCELLING["hy_v4_vl"] = 2e-4

# Multiplies by a parameter that it makes in float32 whatever it is asked for.
FLOAT64_UNSHARDABLE = {"inkling2"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Tensors of one forward and backward. `values` holds output and loss beside the gradients, all by name."""

    values: dict[str, Tensor | None]
    routing: dict[str, Tensor]
    experts_grads: dict[str, tuple[torch.Size, Tensor | None]]

    def routed_like(self, other: Run) -> bool:
        return all(torch.equal(ids, other.routing[name]) for name, ids in self.routing.items())


@cache
def reference_run(name: str, dtype: torch.dtype, seed: int, batch: int, length: int) -> Run:
    """transformers' own loop over the experts: what every implementation is measured by. Run once a session."""
    return run_model(name, "eager", dtype, seed, batch, length)


def run_model(name: str, implementation: str, dtype: torch.dtype, seed: int, batch: int, length: int) -> Run:
    """Forward and backward of the family's model under one experts implementation."""
    model = build_model(name, seed, dtype)
    model.set_experts_implementation(implementation)
    routing: dict[str, Tensor] = {}
    experts = experts_modules(model)
    assert {m.config._experts_implementation for m in experts.values()} == {implementation}
    for key, module in experts.items():
        module.register_forward_pre_hook(lambda _, args, key=key: routing.__setitem__(key, args[1].clone()))
    output, loss = forward(model, sample_batch(model, batch, length, seed))
    loss.backward()
    values: dict[str, Tensor | None] = {"output": output.detach(), "loss": loss.detach()}
    values |= {key: p.grad for key, p in model.named_parameters()}
    grads = {
        f"{key}.{p_name}": (p.shape, p.grad)
        for key, module in experts.items()
        if key in routing  # ernie4_5_vl_moe calls the experts of one modality alone where it sees no other
        for p_name, p in module.named_parameters()
    }
    return Run(values=values, routing=routing, experts_grads=grads)


def difference(got: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference; a shape that differs is an error, not a broadcast."""
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    return float((got.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0


def scale(wanted: Tensor) -> float:
    """The largest magnitude, what relative errors are relative to."""
    return float(wanted.double().abs().max()) if wanted.numel() else 0.0


def check(got: Run, wanted: Run, relative: float, rounding: Run | None = None) -> None:
    """Fails at the first value that is off, with its name. `rounding` is `wanted` in another precision."""
    largest = max(scale(g) for key, g in wanted.values.items() if g is not None and key not in ("output", "loss"))
    for key, value in wanted.values.items():
        ours = got.values[key]
        if value is None:  # nothing came here: the loop leaves no gradient, zeros say the same
            assert ours is None or not ours.any(), f"{key}: gradient unexpected"
            continue
        assert ours is not None, f"{key}: gradient missing"
        own = None if rounding is None else rounding.values[key]
        size = max(scale(value), 1e-4 * largest)  # a gradient of nothing but rounding has no scale of its own
        allowed = max(relative * size, 0.0 if own is None else 4 * difference(value, own))
        error = difference(ours, value)
        assert error <= allowed, f"{key}: off by {error:.2e}, allowed {allowed:.2e}, scale {scale(value):.2e}"
    for key, (shape, grad) in got.experts_grads.items():
        assert grad is not None, f"{key}: no gradient"
        assert grad.shape == shape, f"{key}: gradient {tuple(grad.shape)}, parameter {tuple(shape)}"
