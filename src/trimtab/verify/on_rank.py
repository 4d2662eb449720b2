"""One rank's part of a run: build, step, compare with the truth, and say what was found.

A rank compares what it holds itself; nothing but its results leaves it. They go to the run's store, where the
collector reads them: a rank that stops answering is seen, whatever it hangs in.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from trimtab.errors import TrimtabError
from trimtab.verify.cases import DTYPES, Case
from trimtab.verify.implementation import Implementation, Outcome, Place, Share, Subject, make_place
from trimtab.verify.patterns import make_problem
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import LayerWeights, Problem, Sizes, make_weights, solve, updated

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}
"""Largest difference over the largest true value of the tensor, by the dtype that the case runs in."""
COLLECTORS = timedelta(hours=1)
"""A time-out that never comes: the collector's deadline is sooner."""
READY = -1
"""In place of a case's index: the rank is about to start on its first case."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's result of one case. errors: relative error by column. fault: the error that broke the case off;
    refused: it was raised on purpose. replicas: experts sent to this rank; hot: there had to be some."""

    rank: int
    errors: dict[str, float] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    fault: str | None = None
    refused: bool = False
    seconds: float = 0.0
    replicas: int = 0
    hot: bool = False

    def put(self, store: Store, index: int) -> None:
        """Put it into the store, for `get`."""
        store.set(key_of(index, self.rank), json.dumps(asdict(self)))

    @classmethod
    def get(cls, store: Store, index: int, rank: int) -> RankResult:
        """Wait for what `put` left."""
        return cls(**json.loads(store.get(key_of(index, rank))))


def key_of(index: int, rank: int) -> str:
    """Where in the store the result of `rank` on case `index` lies."""
    return f"case/{index}/{rank}"


def run_on_rank(
    cases: Sequence[tuple[int, Case]], implementation: Implementation, store: Store, device: torch.device, repeat: int
) -> None:
    """Run (index, case) pairs in order and leave this rank's results in `store`. Collective over the world."""
    rank = dist.get_rank()
    RankResult(rank=rank).put(store, READY)
    for topology, group in groupby(cases, key=lambda pair: pair[1].topology):
        bench = Bench(implementation, make_place(topology, rank, device))
        for index, case in group:
            if rank < topology.ranks:
                bench.run(case, repeat).put(store, index)
                others = range(topology.ranks)
                store.wait([key_of(index, other) for other in others], COLLECTORS)
                if any(RankResult.get(store, index, other).fault is not None for other in others):
                    bench.subjects.clear()


class Bench:
    """The subjects of one place. Equal sizes share one; after a fault of any rank all ranks build theirs anew."""

    def __init__(self, implementation: Implementation, place: Place) -> None:
        self.implementation, self.place = implementation, place
        self.subjects: dict[Sizes, tuple[Subject, list[LayerWeights]]] = {}

    def run(self, case: Case, repeat: int = 1) -> RankResult:
        """One case on this rank, `repeat` times. Collective over the ranks of the topology."""
        start = time.perf_counter()
        problem = make_problem(case.topology, case.pattern, DTYPES[case.dtype], case.data_seed)
        try:
            result = self._judge(problem, repeat)
        except Exception as error:
            self.subjects.clear()  # also where all ranks were right to refuse
            good = problem.raises and isinstance(error, self.implementation.refusal)
            shown = str(error) if isinstance(error, TrimtabError) else traceback.format_exc(limit=-3).strip()
            said = None if good else f"{type(error).__name__}: {shown}"
            result = RankResult(rank=self.place.rank, fault=said, refused=not good and raised_on_purpose(error))
        return replace(result, seconds=time.perf_counter() - start)

    def _judge(self, problem: Problem, repeat: int) -> RankResult:
        rank, sizes = self.place.rank, problem.sizes
        if sizes not in self.subjects:
            weights = make_weights(sizes, seed=sizes.num_experts)
            self.subjects[sizes] = self.implementation.build(self.place, sizes, weights), weights
        subject, weights = self.subjects[sizes]
        share, d, here = _share_of(self.place, problem)
        given = {name: tensor.clone() for name, tensor in _named(share).items()}
        outcome = subject.step(share)
        if problem.raises:
            expected = self.implementation.refusal.__name__
            return RankResult(rank=rank, fault=f"bad input went through: expected {expected} on every rank")
        truth = solve(problem, weights)
        true = {"y": truth.y[d][:, here], "dx": truth.dx[d][:, here]}
        grads = getattr(subject, "expected", lambda grads: grads)(truth.grads)
        true |= {f"d {name}": grad for name, grad in grads.items()}
        after = updated(weights, truth.grads, self.place.topology.optimizer)
        true |= {f"new {name}": param for name, param in after.items()}
        true |= {f"loads {i}": loads for i, loads in enumerate(truth.loads) if outcome.loads is not None}
        true = {name: tensor.to(self.place.device) for name, tensor in true.items()}
        got = _tensors(outcome)
        found = compare(got, true, BOUNDS[sizes.dtype], dict.fromkeys(("y", "dx"), sizes.dtype))
        errors: dict[str, float] = {}
        for name in true:
            column = " ".join(part for part in name.replace(".", " ").split() if not part.isdigit())
            errors[column] = max(errors.get(column, 0.0), found[name][0])
        wrong = [said for _, said in found.values()]
        for run in range(2, repeat + 1):
            again = compare(_tensors(subject.step(share)), got, 0.0, {})
            wrong += [said and f"in run {run}, {said}" for _, said in again.values()]
        for slots_P in outcome.slots or [] if self.place.topology.replicas == "replicas" else []:
            most, mean = int(slots_P.max()), -(-int(slots_P.sum()) // slots_P.shape[0])
            wrong += [f"a rank computes {most} slots where {mean} are the mean"] if most > mean else []
        now = {name: tensor.view(torch.uint8) for name, tensor in _named(share).items()}  # NaN equals itself
        changed = [name for name, tensor in now.items() if not torch.equal(tensor, given[name].view(torch.uint8))]
        fault = f"changed its input in place: {', '.join(changed)}" if changed else None
        mismatches = [f"rank {rank}: {said}" for said in wrong if said]
        own = self.place.experts.get_local_rank("ep")
        replicas = sum(int(copied[own]) for copied in outcome.copied or [])
        hot = any(has_to_replicate(self.place.topology, loads) for loads in truth.loads)
        return RankResult(rank=rank, errors=errors, mismatches=mismatches, fault=fault, replicas=replicas, hot=hot)


def has_to_replicate(t: Topology, loads_E: Tensor) -> bool:
    """True if with these loads, over all expert groups, at least one rank has more slots than the mean of its group's,
    rounded up. Where groups have uneven numbers of tokens some such ranks are not known."""
    loads_P = loads_E.view(t.ep, -1).sum(1)
    groups = t.edp  # ranks that split experts compute their slots together
    return t.replicas == "replicas" and int(loads_P.max()) > (int(loads_P.sum()) + groups * (t.ep - 1)) // t.ep


def raised_on_purpose(error: Exception) -> bool:
    """True if a `raise` or an `assert` of an implementation's own code did it, rather than PyTorch or Python."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file, stated = Path(frame.filename), (frame.line or "").startswith(("raise ", "assert "))
    return stated and "torch" not in file.parts and Path(__file__).parent not in file.parents


def _share_of(place: Place, problem: Problem) -> tuple[Share, int, slice]:
    """(this rank's part, in memory of its own; the data-parallel rank whose batch it is cut from; where)."""
    d, t = divmod(place.rank, place.topology.tp)
    batch = problem.batches[d]
    whole = place.topology.tokens == "replicated"
    here = slice(0, batch.cuts[-1]) if whole else slice(batch.cuts[t], batch.cuts[t + 1])

    def cut(tensor_BL: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor_BL[:, here].to(place.device, dtype, copy=True).contiguous()

    share = Share(
        x_BlD=cut(batch.x_BLD, problem.sizes.dtype), dy_BlD=cut(batch.dy_BLD, problem.sizes.dtype),
        ids_BlK=cut(batch.ids_BLK) if batch.replayed else None,
        mask_Bl=None if batch.mask_BL is None else cut(batch.mask_BL),
        documents_Bl=None if batch.documents_BL is None else cut(batch.documents_BL),
    )  # fmt: skip
    return share, d, here


def _named(share: Share) -> dict[str, Tensor]:
    """All that a rank is given, by name."""
    named = {"x": share.x_BlD, "dy": share.dy_BlD, "ids": share.ids_BlK, "mask": share.mask_Bl}
    named["documents"] = share.documents_Bl
    return {name: tensor.detach() for name, tensor in named.items() if tensor is not None}


def _tensors(outcome: Outcome) -> dict[str, Tensor]:
    """All that came of a step, by name. A gradient of None is left out, and so reported as missing."""
    named: dict[str, Tensor | None] = {"y": outcome.y, "dx": outcome.dx}
    named |= {f"d {name}": grad for name, grad in outcome.grads.items()}
    named |= {f"new {name}": param for name, param in outcome.updated.items()}
    named |= {f"loads {i}": loads for i, loads in enumerate(outcome.loads or [])}
    return {name: tensor.detach().clone() for name, tensor in named.items() if tensor is not None}


def compare(
    got: dict[str, Tensor], true: dict[str, Tensor], bound: float, dtypes: dict[str, torch.dtype]
) -> dict[str, tuple[float, str]]:
    """By name: the relative error, and what is wrong, or "". NaN is beyond any bound.

    A tensor that is missing, of another shape or of another dtype than `dtypes` says, or that nobody asked for, is
    wrong before a number of it is read.
    """
    found = {}
    for name in [*true, *sorted(got.keys() - true.keys())]:
        error, said = _compare_one(got.get(name), true.get(name), bound, dtypes.get(name))
        found[name] = error, said and name + said
    return found


def _compare_one(
    got: Tensor | None, truth: Tensor | None, bound: float, dtype: torch.dtype | None
) -> tuple[float, str]:
    if got is None or truth is None or got.shape != truth.shape:
        shown, expected = (t if t is None else f"shape {tuple(t.shape)}" for t in (got, truth))
        return float("inf"), f": got {shown or 'no tensor'}, expected {expected or 'no such tensor'}"
    if dtype is not None and got.dtype != dtype:
        return float("inf"), f": got dtype {got.dtype}, expected dtype {dtype}"
    ours, true = got.detach().double().reshape(-1), truth.detach().double().reshape(-1)
    scale = true.abs().max().item() if true.numel() else 0.0
    off = ((ours - true).abs() / (scale or 1.0)).nan_to_num(nan=float("inf"))
    error = off.max().item() if off.numel() else 0.0
    if error <= bound:
        return error, ""
    first = int((off > bound).nonzero()[0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), truth.shape)]
    said = f"got {ours[first].item():.9g}, expected {true[first].item():.9g} (relative error {error:.1e})"
    return error, f"{place or ''}: {said}"
