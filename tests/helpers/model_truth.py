"""What ranks should have got, transformers' own loop in one process over every rank's own data, and the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from trimtab.integrations.transformers import dequantize_experts, quantize_experts

from .families import build_model, experts_modules
from .model_case import Case, Outcome, Router, balance, prepare, run

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

OTHER = {torch.float32: torch.float64, torch.float64: torch.float32}
Outcomes = dict[str, list[Outcome]]
"""By pattern, of each data-parallel rank."""


def in_one_process(case: Case) -> Outcomes:
    """What each data-parallel rank should see. The loss whose gradients these are is the mean of the ranks' losses."""
    model = build_model(case.family, case.seed, case.dtype)
    if case.mesh.ranks > 1 and case.family not in FLOAT64_UNSHARDABLE:
        model.to(case.dtype)  # also what `from_pretrained` would leave in float32 if it were asked for bfloat16
    model.set_experts_implementation(case.experts)
    assert {m.config._experts_implementation for m in experts_modules(model).values()} == {case.experts}
    if case.codes:
        dequantize_experts(quantize_experts(model, case.codes))
    prepare(case, model)
    ranks = case.mesh.data_ranks
    if case.balance:
        values, grads = balance(case, model, None)
        return {"balance": [Outcome(values=values, grads=grads, routing={})] * ranks}
    router, found = Router(model, case.mesh, 1), {}
    for pattern in case.patterns:
        model.zero_grad()
        seen = [(run(case, model, router, pattern, rank, case.steps * ranks), router.seen) for rank in range(ranks)]
        grads = {name: p.grad for name, p in model.named_parameters()}
        found[pattern] = [Outcome(values=values, grads=grads, routing=routing) for values, routing in seen]
    return found


@cache
def _truth(case: Case) -> Outcomes:
    return in_one_process(case)


def truth(case: Case) -> Outcomes:
    return _truth(replace(case, experts="eager", exchange="", unsynced=False, recompute="", ddp=False))


def scale(wanted: Tensor | None) -> float:
    """The largest magnitude, what relative errors are relative to."""
    return 0.0 if wanted is None or not wanted.numel() else float(wanted.double().abs().max())


def difference(got: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference; a shape that differs is an error, not a broadcast."""
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    return float((got.double() - wanted.double()).abs().nan_to_num(torch.inf).max()) if wanted.numel() else 0.0


def errors(case: Case, ours: Outcome, wanted: Outcome, other: Outcome) -> Iterator[str]:
    """Every tensor that is off. `other` is `wanted` in another precision: a value may be off by the bound, or by as
    much as rounding moves it in the truth itself."""
    families, bound = (FLOAT32_INSIDE, 1e-10) if case.dtype == torch.float64 else (CANCELLING, 2e-6)
    bound = families.get(case.family, bound)
    if case.balance and case.family == "deepseek_v3":
        bound = 2e-6  # its router's scores are in float32
    largest = max(map(scale, wanted.grads.values()))
    missing = wanted.grads.keys() - ours.grads.keys() | wanted.values.keys() ^ ours.values.keys()
    yield from (f"{name}: there is none" for name in missing)
    for name, value in (wanted.values | wanted.grads).items():
        if name in missing:
            continue
        got, rounded = (ours.values | ours.grads)[name], (other.values | other.grads)[name]
        if value is None:  # nothing came here: the loop leaves no gradient, zeros say the same
            if got is not None and got.any():
                yield f"{name}: a gradient where none belongs"
            continue
        if got is None:
            yield f"{name}: no gradient"
            continue
        assert rounded is not None
        size = max(scale(value), 0.0 if name in wanted.values else 1e-4 * largest)  # what is smaller is rounding
        loose = 2e-6 if case.balance and name in wanted.values else bound  # biases, losses and loads are in float32
        allowed = max(loose * size, 4 * difference(rounded, value))
        if (off := difference(got, value)) > allowed:
            yield f"{name}: off by {off:.2e}, allowed {allowed:.2e}, scale {size:.2e}"


def judge(case: Case, answers: list[dict[str, Outcome]]) -> list[str] | None:
    """All errors of a case, or None where a near tie in a router fell another way and nothing can be said. answers: of
    each rank, by pattern."""
    wanted = other = truth(case)
    if case.autocast:
        other = truth(replace(case, autocast=False))
    elif case.dtype == torch.float32 or (case.mesh.ranks > 1 and case.family in FLOAT32_INSIDE):
        other = truth(replace(case, dtype=OTHER[case.dtype]))
    found = []
    for rank, answer in enumerate(answers):
        for pattern, ours in answer.items():
            true, rounded = (of[pattern][case.mesh.data_rank(rank)] for of in (wanted, other))
            for name, ids in true.routing.items():
                if not (torch.equal(ours.routing[name], ids) and torch.equal(rounded.routing[name], ids)):
                    return None
            found += [f"{case}, {pattern}, rank {rank}: {error}" for error in errors(case, ours, true, rounded)]
    return found
