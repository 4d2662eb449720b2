"""What the ranks should have got: one process over every rank's own data, and the comparison with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from trimtab.integrations.transformers import dequantize_experts, quantize_experts, register

from .ep_case import Case, Router, batches, freeze
from .ep_ranks import Answer, Outcome
from .families import build_model, experts_modules, forward
from .parity import CANCELLING, FLOAT32_INSIDE, FLOAT64_UNSHARDABLE, scale

OTHER = {torch.float32: torch.float64, torch.float64: torch.float32}


def reference(case: Case, weights: Mapping[str, Tensor]) -> dict[str, list[Outcome]]:
    """For each pattern what each data-parallel rank should see, from transformers' own loop in one process.

    The loss whose gradients these are is the mean of the ranks' losses. `weights` replace the family's own.
    """
    if weights:
        return _reference(case, weights)
    return _reference_as_built(replace(case, experts="eager", exchange="", unsynced=False, recompute=""))


@cache
def _reference_as_built(case: Case) -> dict[str, list[Outcome]]:
    return _reference(case, {})


def _reference(case: Case, weights: Mapping[str, Tensor]) -> dict[str, list[Outcome]]:
    model = build_model(case.family, case.seed, case.dtype)
    if case.family not in FLOAT64_UNSHARDABLE:
        model.to(case.dtype)  # also what `from_pretrained` would leave in float32 if it were asked for bfloat16
    if case.codes:
        register()
        model.set_experts_implementation("trimtab")
        dequantize_experts(quantize_experts(model, case.codes))
    model.set_experts_implementation("eager")
    freeze(case, model)
    with torch.no_grad():
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight)
    sizes = {name: int(m.num_experts) for name, m in experts_modules(model).items()}  # type: ignore[call-overload]
    router = Router(model, case.mesh, sizes)
    wanted = {}
    for pattern in case.patterns:
        router.pattern = pattern
        model.zero_grad()
        seen = []
        for router.data_rank in range(case.mesh.data_ranks):
            router.seen = {}
            outputs, losses = [], []
            for batch in batches(case, model, pattern, router.data_rank):
                output, loss = forward(model, batch)
                (loss / (case.steps * case.mesh.data_ranks)).backward()
                outputs.append(output.detach())
                losses.append(loss.detach())
            seen.append(({"output": torch.stack(outputs), "loss": torch.stack(losses)}, router.seen))
        grads = {name: p.grad for name, p in model.named_parameters()}
        wanted[pattern] = [Outcome(values=own | grads, routing=routing) for own, routing in seen]
    return wanted


def routed_alike(some: Outcome, other: Outcome) -> bool:
    """Whether every slot went to the same expert: a near tie may fall either way."""
    return all(torch.equal(ids, other.routing[name]) for name, ids in some.routing.items())


def bound(case: Case) -> float:
    """The relative error that is still rounding."""
    if case.dtype == torch.float64:
        return FLOAT32_INSIDE.get(case.family, 1e-10)
    return CANCELLING.get(case.family, 2e-6)


def compare(got: Tensor, wanted: Tensor, size: float, allowed: float) -> str:
    """What is off by more than `allowed` of `size`, the worst value of it; empty if nothing is."""
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    off = ((got.double() - wanted.double()).abs().flatten() / size).nan_to_num(torch.inf)
    if not off.numel() or off.max() <= allowed:
        return ""
    worst = int(off.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape))
    values = float(got.flatten()[worst]), float(wanted.flatten()[worst])
    return f"{place}: got {values[0]:.9g}, wanted {values[1]:.9g}: off by {off[worst]:.2e}, allowed {allowed:.2e}"


def errors(
    case: Case,
    answers: list[Answer],
    wanted: Mapping[str, list[Outcome]],
    rounding: Mapping[str, list[Outcome]] | None = None,
) -> list[str]:
    """Every tensor of every pattern on every rank that is off. `rounding` is `wanted` in another precision."""
    found = []
    for rank, answer in enumerate(answers):
        data_rank = case.mesh.data_rank(rank)
        for pattern, outcomes in wanted.items():
            values = outcomes[data_rank].values
            largest = max(scale(v) for k, v in values.items() if v is not None and k not in ("output", "loss"))
            for name, value in values.items():
                where = f"{case}, {pattern}, rank {rank}: {name}"
                ours = answer.outcomes[pattern].values[name]
                if value is None:  # nothing came here: the loop leaves no gradient, zeros say the same
                    assert ours is None or not ours.any(), f"{where}: a gradient where none belongs"
                    continue
                assert ours is not None, f"{where}: no gradient"
                size = max(scale(value), 1e-4 * largest)  # a gradient of nothing but rounding has no scale of its own
                allowed = bound(case)
                if rounding is not None:
                    exact = rounding[pattern][data_rank].values[name]
                    assert exact is not None
                    allowed = max(allowed, 4 * float((exact.double() - value.double()).abs().max()) / size)
                if problem := compare(ours, value, size, allowed):
                    found.append(f"{where}{problem}")
    return found


def judge(case: Case, answers: list[Answer]) -> list[str] | None:
    """All errors of a case, or None where a near tie in a router fell another way and nothing can be said.

    Where float32 rounds, a value may be off by the bound, or by as much as rounding moves it in the reference itself.
    """
    weights = answers[0].weights
    wanted = other = reference(case, weights)
    if case.dtype == torch.float32 or case.family in FLOAT32_INSIDE:
        other = reference(replace(case, dtype=OTHER[case.dtype]), weights)
    for pattern, outcomes in wanted.items():
        runs = [(answer.outcomes[pattern], case.mesh.data_rank(rank)) for rank, answer in enumerate(answers)]
        runs += [(outcome, data_rank) for data_rank, outcome in enumerate(other[pattern])]
        if not all(routed_alike(run, outcomes[data_rank]) for run, data_rank in runs):
            return None
    return errors(case, answers, wanted, None if other is wanted else other)
