"""A failing case made small: each step that leaves it failing is kept, until no step does.

Steps take away cases, tokens, ranks, choices and experts, and turn options and values into the plainest ones.

Legend: P ranks, K experts per token, e experts per rank, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from fuzz.cases import Case, Shape

Cases = tuple[Case, ...]
Value = TypeVar("Value")
Step = Callable[[Case], Iterator[Case]]
Fails = Callable[[Sequence[Case]], bool]


def shrink(cases: Sequence[Case], fails: Fails, *, tries: int = 2000) -> Cases:
    """The smallest cases found within `tries` runs that still fail, whatever the way in which they fail."""
    smallest: Cases | None = tuple(cases)
    left = iter(range(tries))
    while smallest is not None:
        found = smallest
        smallest = next((smaller for smaller, _ in zip(_smaller(found), left, strict=False) if fails(smaller)), None)
    return found


def _smaller(cases: Cases) -> Iterator[Cases]:
    """Simpler versions, the boldest first. All cases keep one shape."""
    if len(cases) > 1:
        half = len(cases) // 2
        yield cases[half:]
        yield cases[:half]
        for i in range(len(cases)):
            yield cases[:i] + cases[i + 1 :]
    yield from _each(cases, _fewer_tokens)
    for step in (_fewer_ranks, _fewer_choices, _fewer_experts, _plainer_shapes):
        for every in zip(*(step(case) for case in cases), strict=False):
            if every != cases:
                yield every
    yield from _each(cases, _plainer_values)


def _each(cases: Cases, step: Step) -> Iterator[Cases]:
    """One case after the other taken through a step that leaves the shape as it is."""
    for i, case in enumerate(cases):
        for smaller in step(case):
            if smaller != case:
                yield (*cases[:i], smaller, *cases[i + 1 :])


def _fewer_tokens(case: Case) -> Iterator[Case]:
    """Half of the tokens, then one fewer; of sharded sequences whole sequences."""
    per = sum(case.shape.lengths) if case.shape.lengths is not None else 1
    units = len(case.holder) // max(per, 1)
    for size in sorted({max(units // 2, 1), 1}, reverse=True):
        for start in range(0, units, size):
            gone = range(start * per, (start + size) * per)
            yield _take(case, [t for t in range(len(case.holder)) if t not in gone])


def _fewer_ranks(case: Case) -> Iterator[Case]:
    """Without one rank, its tokens and its experts; or, if sharded, without one position of a rank."""
    shape, lengths = case.shape, case.shape.lengths
    for gone in range(shape.ranks if shape.ranks > 1 else 0):
        kept = _take(case, [t for t, rank in enumerate(case.holder) if rank != gone])
        ids = tuple(tuple(_without(i, gone * shape.experts, shape.experts) for i in row) for row in kept.ids)
        fewer = None if lengths is None else lengths[:gone] + lengths[gone + 1 :]
        yield replace(
            kept,
            shape=replace(shape, ranks=shape.ranks - 1, lengths=fewer),
            holder=tuple(rank - (rank > gone) for rank in kept.holder),
            ids=ids,
        )
    if lengths is None:
        yield from _merged_ranks(case)
        return
    starts = [sum(lengths[:rank]) for rank in range(shape.ranks)]
    for rank, length in enumerate(lengths):
        if length:
            fewer = (*lengths[:rank], length - 1, *lengths[rank + 1 :])
            keep = [t for t in range(len(case.holder)) if t % sum(lengths) != starts[rank]]
            yield replace(_take(case, keep), shape=replace(shape, lengths=fewer))
    yield replace(
        _take(case, sorted(range(len(case.holder)), key=lambda t: case.holder[t])), shape=replace(shape, lengths=None)
    )


def _merged_ranks(case: Case) -> Iterator[Case]:
    """One rank's tokens and its experts' slots handed to the rank before it."""
    shape, e = case.shape, case.shape.experts
    for gone in range(1, shape.ranks):
        yield replace(
            case,
            shape=replace(shape, ranks=shape.ranks - 1),
            holder=tuple(rank - (rank >= gone) for rank in case.holder),
            ids=tuple(tuple(i - e * (i >= gone * e) for i in row) for row in case.ids),
        )


def _fewer_choices(case: Case) -> Iterator[Case]:
    """Without the k-th expert of every token."""
    shape = replace(case.shape, top_k=case.shape.top_k - 1)
    for k in range(case.shape.top_k if case.shape.top_k > 1 else 0):
        ids, weights = (tuple(row[:k] + row[k + 1 :] for row in rows) for rows in (case.ids, case.weights))
        yield replace(case, shape=shape, ids=ids, weights=weights)


def _fewer_experts(case: Case) -> Iterator[Case]:
    """Without the j-th expert of every rank."""
    e = case.shape.experts
    for j in range(e if e > 1 else 0):
        ids = tuple(tuple(-1 if i < 0 or i % e == j else i - i // e - (i % e > j) for i in row) for row in case.ids)
        yield replace(case, shape=replace(case.shape, experts=e - 1), ids=ids)


def _plainer_shapes(case: Case) -> Iterator[Case]:
    """One option after the other as `Shape` has it by default; sizes are not options."""
    for option in fields(Shape):
        if option.name in ("width", "dtype", "combine", "alignment", "plan", "transport", "poisoned"):
            plain: dict[str, Any] = {option.name: option.default}
            yield replace(case, shape=replace(case.shape, **plain))


def _plainer_values(case: Case) -> Iterator[Case]:
    """Tokens unmasked, weights of one, slots dropped or for expert 0: all at once, then one token at a time."""
    yield replace(case, real=(True,) * len(case.real))
    yield replace(case, weights=tuple((1,) * len(row) for row in case.weights))
    for t, row in enumerate(case.ids):
        for k, expert in enumerate(row):
            for plain in [-1] * (expert > -1) + [0] * (expert > 0):
                changed = (*row[:k], plain, *row[k + 1 :])
                yield replace(case, ids=(*case.ids[:t], changed, *case.ids[t + 1 :]))


def _take(case: Case, keep: list[int]) -> Case:
    def pick(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(values[i] for i in keep)

    return replace(case, holder=pick(case.holder), ids=pick(case.ids), weights=pick(case.weights), real=pick(case.real))


def _without(expert: int, start: int, count: int) -> int:
    """The id of an expert once `count` experts from `start` are gone; their own slots are dropped."""
    if start <= expert < start + count:
        return -1
    return expert - count if expert >= start + count else expert
