"""docs/peers.md: who was judged, what came of it, and how to see each failure with one's own eyes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from peers.failures import FAILURES, Failure
from peers.judge import Judged, Result, Status
from peers.registry import OURS_ALONE, ROOT, Peer, peer_named
from trimtab.verify.ledger import machine
from trimtab.verify.patterns import PATTERNS

MARKS: dict[Status, str] = {"right": ".", "wrong": "W", "refused": "R", "crashed": "C", "hung": "H", "lacks": "-"}
PAGE = ROOT.parent / "docs" / "peers.md"
SHOWN = [pattern.name for pattern in PATTERNS if pattern.name not in OURS_ALONE]


def table(result: Result) -> str:
    """Topologies down, patterns across."""
    rows = list(dict.fromkeys(case.topology for case in result.cases))
    marks = {(case.topology, case.pattern): MARKS[case.status] for case in result.cases}
    width = max(map(len, rows))
    numbers = [f"{i:2}" for i in range(1, len(SHOWN) + 1)]
    lines = [f"{'':{width}}  {''.join(digits)}" for digits in zip(*numbers, strict=True)]
    lines += [f"{row:{width}}  {''.join(marks.get((row, name), ' ') for name in SHOWN)}" for row in rows]
    return "\n".join(lines)


def explained(results: Mapping[str, Result]) -> tuple[dict[str, list[tuple[Peer, Judged]]], list[tuple[Peer, Judged]]]:
    """Failing cases by what explains them, and those that nothing does."""
    by_failure: dict[str, list[tuple[Peer, Judged]]] = {failure.id: [] for failure in FAILURES}
    unknown = []
    for name, result in results.items():
        peer = peer_named(name)
        for case in result.cases:
            if case.status in ("right", "lacks"):
                continue
            known = next((failure for failure in FAILURES if failure.explains(peer, case)), None)
            if known is None:
                unknown.append((peer, case))
            else:
                by_failure[known.id].append((peer, case))
    return by_failure, unknown


def write_page(results: Mapping[str, Result], seen: Mapping[str, Mapping[str, Sequence[str]]]) -> int:
    """Write it. 1 where a failure is explained by nothing, or one that is listed did not come.

    seen: what the ranks of each reproduction ended with, by failure and version.
    """
    by_failure, unknown = explained(results)
    PAGE.write_text("\n".join(_page(results, by_failure, unknown, seen)) + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT.parent)}")
    for peer, case in unknown:
        print(f"not explained: {peer.name} {case.topology}/{case.pattern}: {case.status}: {case.said}")
    return int(bool(unknown))


def _page(
    results: Mapping[str, Result], by_failure: Mapping[str, list[tuple[Peer, Judged]]],
    unknown: list[tuple[Peer, Judged]], seen: Mapping[str, Mapping[str, Sequence[str]]],
) -> Iterator[str]:  # fmt: skip
    yield HEAD
    yield ", ".join(f"{name} {value}" for name, value in machine().items()) + "; Gloo, one thread a rank.\n"
    yield "| peer | version | asked | right | largest error | wrong | refused | crashed | hung |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, result in results.items():
        yield _row(peer_named(name), result)
    if not any(case.status == "wrong" for result in results.values() for case in result.cases):
        yield "\nNone gave a wrong number in a case that it came to the end of. Outside of the ledger one did: below."
    yield TABLES
    yield "```"
    says = {pattern.name: pattern.says for pattern in PATTERNS}
    yield from (f"{i:3} {name}: {says[name]}" for i, name in enumerate(SHOWN, 1))
    yield "\n    " + "   ".join(f"{mark} {status}" for status, mark in MARKS.items())
    yield "```\n"
    for name, result in results.items():
        if result.cases:
            yield from _peer(peer_named(name), result)
    yield FAILED
    for failure in FAILURES:
        yield from _failure(failure, by_failure[failure.id], seen.get(failure.id, {}))
    if unknown:
        yield "### Not yet explained\n"
        yield from (f"* {p.title}, {c.topology}/{c.pattern}: {c.status}: `{c.said}`" for p, c in unknown)
    yield ABSENT
    for name, result in results.items():
        if result.absent:
            yield f"* {peer_named(name).title}: {result.absent}"


def _row(peer: Peer, result: Result) -> str:
    if result.absent:
        return f"| {peer.title} | | not judged here, see the end | | | | | | |"
    counts = Counter(case.status for case in result.cases)
    right = [case.error for case in result.cases if case.status == "right" and case.error is not None]
    wrong = [case.error for case in result.cases if case.status == "wrong" and case.error is not None]
    asked = len(result.cases) - counts["lacks"]
    largest = f"{max(right):.1e} ({peer.dtype})" if right else ""
    told = f"{counts['wrong']} (by {max(wrong):.1e} at most)" if wrong else "0"
    rest = " | ".join(str(counts[status]) for status in ("refused", "crashed", "hung"))
    return f"| {peer.title} | {result.version} | {asked} | {counts['right']} | {largest} | {told} | {rest} |"


def _peer(peer: Peer, result: Result) -> Iterator[str]:
    yield f"### {peer.title}\n"
    yield f"{result.version}. {peer.says}. `--impl {peer.impl}`, {peer.dtype}.\n"
    asked = [case for case in result.cases if case.status != "lacks"]
    off = dict.fromkeys(case.pattern for case in asked if case.status != "right")
    yield "Right in all that it was asked for" + (f", but for {', '.join(off)}" if off else "") + ".\n"
    yield f"```\n{table(result)}\n```\n"
    lacking = dict.fromkeys(case.said for case in result.cases if case.status == "lacks")
    if lacking:
        yield "Not asked (`-`): " + "; ".join(lacking) + ".\n"


def _failure(
    failure: Failure, cases: Sequence[tuple[Peer, Judged]], seen: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    yield f"### {failure.title}\n"
    if failure.gloo:
        yield "*Of Gloo or of a stand-in: not to be expected on GPUs with NCCL.*\n"
    yield failure.says + "\n"
    if cases:
        who, patterns = (
            list(dict.fromkeys(found)) for found in zip(*((p.title, c.pattern) for p, c in cases), strict=True)
        )
        yield f"In the ledger: {len(cases)} cases of {'; '.join(who)} ({', '.join(patterns)}).\n"
    yield f"```text\n{failure.lines}\n```\n"
    yield f"`python -m peers --reproduce {failure.id}`, after the prelude `{failure.prelude}`:\n"
    yield "```"
    alike: dict[tuple[str, ...], list[str]] = {}
    for version, ends in seen.items():
        alike.setdefault(tuple(ends), []).append(version)
    for ends, versions in alike.items():
        yield "; ".join(versions) + ":"
        told = {end: [rank for rank, other in enumerate(ends) if other == end] for end in ends}
        yield from (f"    rank {', '.join(map(str, ranks))}: {end}" for end, ranks in told.items())
    yield "```\n"


HEAD = """# Peers

Other libraries' MoE layers under the judgement that [our own](ledger.md) is under: outputs, input gradients and every
parameter's gradient against a dense float64 truth, on real processes over Gloo on a CPU, with different tokens on each
rank. Printed by `make peers`.

Read it with care. These libraries are written for GPUs and NCCL, most of them for long, even sequences; they are right
where their users are most of the time, and much of what fails below fails at the edge: a rank without tokens, ranks
with unequal numbers of them. A failure is listed when the peer's documented configuration leads to it, and it was seen
twice: in the ledger, and in a few lines outside of it that do not use its harness. What comes from Gloo, or from a
stand-in for CUDA, is marked so. What a peer does not offer is not held against it: it isn't asked. Three patterns of
our ledger judge what we alone promise (which of equal scores goes first, an error for a NaN, an error for an id out of
range) and are left out. Corrections are welcome: an adapter that sets a peer up wrongly is our mistake.
"""

TABLES = """
## Case by case

Arrangements are named as in [the ledger](ledger.md): ranks, expert parallelism, expert tensor parallelism, tensor
parallelism, data parallelism.
"""

FAILED = """## What fails, and how to see it

Each was run outside of the ledger as well: the lines below on every rank, after a prelude of imports and one small
layer, which is in tests/peers/preludes.py; below them is what the ranks ended with. On a GPU they need no stand-ins.
"""

ABSENT = """## What could not be judged on a CPU

* TransformerEngine's experts; DeepEP, HybridEP and NCCL EP (Megatron's `flex` dispatcher, torchtitan's and DeepSpeed's
  backends of that name); the Triton kernels of VeOmni and of DeepSpeed: they need a GPU.
* torchtitan's FSDP, tensor and sequence parallelism, DeepSpeed's AutoTP, VeOmni's FSDP2: their trainers lay them out,
  and those are not wired here.
* VeOmni imports on a CPU with stand-ins alone, which its section names."""
