"""One rank's part of a run: build, step, compare with the truth, and say what was found.

A rank compares what it holds itself; nothing but its findings leaves it. They go to the run's store, where the
collector reads them: a rank that stops answering is seen, whatever it hangs in.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trimtab.errors import TrimtabError
from trimtab.verify.adapters.base import Implementation, Outcome, Place, Share, Subject
from trimtab.verify.cases import DTYPES, Case
from trimtab.verify.judge import BOUNDS, Mismatch, compare, unlike
from trimtab.verify.patterns import make_problem
from trimtab.verify.place import make_place, share_of
from trimtab.verify.problem import LayerWeights, Problem, Sizes, make_weights
from trimtab.verify.truth import solve


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one rank says of one case. errors: relative error by column. fault: what broke the case off."""

    rank: int
    errors: dict[str, float] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    fault: str | None = None
    seconds: float = 0.0

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Finding:
        """What `to_json` wrote."""
        made: dict[str, Any] = json.loads(text)
        made["mismatches"] = [Mismatch(**{**m, "place": tuple(m["place"])}) for m in made["mismatches"]]
        return cls(**made)


def ready_key(rank: int) -> str:
    """Set in the store once `rank` is about to start on its first case."""
    return f"ready/{rank}"


def key_of(index: int, rank: int) -> str:
    """Where in the store the finding of `rank` on case `index` lies."""
    return f"case/{index}/{rank}"


def run_on_rank(
    cases: Sequence[tuple[int, Case]],
    implementation: Implementation,
    store: Store,
    device: torch.device,
    repeat: int,
) -> None:
    """Run (index, case) pairs in order and leave this rank's findings in `store`. Collective over the world."""
    rank = dist.get_rank()
    store.set(ready_key(rank), Finding(rank=rank).to_json())
    for topology, group in groupby(cases, key=lambda pair: pair[1].topology):
        place = make_place(topology, rank, device)
        bench = Bench(implementation, place)
        for index, case in group:
            if rank < topology.ranks:
                store.set(key_of(index, rank), bench.run(case, repeat).to_json())
                if _any_fault(index, topology.ranks, store):
                    bench.clear()


def _any_fault(index: int, ranks: int, store: Store) -> bool:
    """Whether a rank's finding on case `index` is a fault, once all are there; the same on all ranks."""
    keys = [key_of(index, rank) for rank in range(ranks)]
    store.wait(keys, timedelta(hours=1))  # the collector's deadline comes first
    return any(Finding.from_json(text.decode()).fault is not None for text in store.multi_get(keys))


class Bench:
    """The subjects of one place. Equal sizes share one; after a fault of any rank all ranks build theirs anew."""

    def __init__(self, implementation: Implementation, place: Place) -> None:
        self.implementation, self.place = implementation, place
        self._subjects: dict[Sizes, tuple[Subject, list[LayerWeights]]] = {}

    def clear(self) -> None:
        """Have all subjects built anew."""
        self._subjects.clear()

    def run(self, case: Case, repeat: int) -> Finding:
        """One case on this rank, `repeat` times. Collective over the ranks of the topology."""
        start = time.perf_counter()
        problem = make_problem(case.topology, case.pattern, DTYPES[case.dtype], case.data_seed)
        try:
            finding = self._judge(problem, repeat)
        except Exception as error:
            self.clear()  # also where all ranks were right to refuse
            good = problem.raises and isinstance(error, self.implementation.refusal)
            shown = str(error) if isinstance(error, TrimtabError) else traceback.format_exc(limit=-3).strip()
            finding = Finding(rank=self.place.rank, fault=None if good else f"{type(error).__name__}: {shown}")
        return replace(finding, seconds=time.perf_counter() - start)

    def _judge(self, problem: Problem, repeat: int) -> Finding:
        rank = self.place.rank
        if problem.sizes not in self._subjects:
            weights = make_weights(problem.sizes, seed=problem.sizes.num_experts)
            self._subjects[problem.sizes] = self.implementation.build(self.place, problem.sizes, weights), weights
        subject, weights = self._subjects[problem.sizes]
        share, batch, here = share_of(self.place, problem)
        given = {name: tensor.clone() for name, tensor in _named(share).items()}
        outcome = subject.step(share)
        if problem.raises:
            expected = self.implementation.refusal.__name__
            return Finding(rank=rank, fault=f"bad input went through: expected {expected} on every rank")
        truth = solve(problem, weights)
        d = next(i for i, other in enumerate(problem.batches) if other is batch)
        true = {"y": truth.y[d][:, here], "dx": truth.dx[d][:, here]}
        true |= {f"d {name}": grad for name, grad in truth.grads.items()}
        true |= {f"loads {i}": loads for i, loads in enumerate(truth.loads) if outcome.loads is not None}
        got = _tensors(outcome)
        bound = BOUNDS[problem.sizes.dtype]
        as_x = {"y": share.x_BlD.dtype, "dx": share.x_BlD.dtype}
        found = {
            name: compare(rank, name, got.get(name), t.to(self.place.device), bound, as_x.get(name))
            for name, t in true.items()
        }
        mismatches = [mismatch for _, mismatch in found.values() if mismatch is not None]
        more = [name for name in got if name not in true]
        mismatches += [unlike(rank, name, f"shape {tuple(got[name].shape)}", "no such tensor") for name in more]
        errors: dict[str, float] = {}
        for name, (error, _) in found.items():
            column = _column(name)
            errors[column] = max(errors.get(column, 0.0), error)
        mismatches += self._again(subject, share, got, repeat)
        changed = [name for name, tensor in _named(share).items() if not _same_bits(tensor, given[name])]
        fault = f"changed its input in place: {', '.join(changed)}" if changed else None
        return Finding(rank=rank, errors=errors, mismatches=mismatches, fault=fault)

    def _again(self, subject: Subject, share: Share, first: dict[str, torch.Tensor], repeat: int) -> Iterator[Mismatch]:
        """Where one of `repeat - 1` further runs differs from the first, in any bit."""
        for run in range(1, repeat):
            for name, tensor in _tensors(subject.step(share)).items():
                _, mismatch = compare(self.place.rank, f"{name} of run {run + 1}", tensor, first[name], 0.0)
                if mismatch is not None:
                    yield mismatch


def _named(share: Share) -> dict[str, torch.Tensor]:
    """All that a rank is given, by name."""
    named = {"x": share.x_BlD, "dy": share.dy_BlD, "ids": share.ids_BlK, "mask": share.mask_Bl}
    return {name: tensor.detach() for name, tensor in named.items() if tensor is not None}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN is equal to itself here."""
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _tensors(outcome: Outcome) -> dict[str, torch.Tensor]:
    """All that came of a step, by name. A gradient of None is left out, and so reported as missing."""
    named: dict[str, torch.Tensor | None] = {"y": outcome.y, "dx": outcome.dx}
    named |= {f"d {name}": grad for name, grad in outcome.grads.items()}
    named |= {f"loads {i}": loads for i, loads in enumerate(outcome.loads or [])}
    return {name: tensor.detach().clone() for name, tensor in named.items() if tensor is not None}


def _column(name: str) -> str:
    """The ledger's column of a tensor: the same for every layer."""
    return " ".join(part for part in name.replace(".", " ").split() if not part.isdigit())
