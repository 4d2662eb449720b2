"""`python -m benchmarks frozen`: experts that nobody trains, beside the CPU kernels of other projects.

Qwen3-30B's layer, on two threads: the forward of a layer without a graph, of few tokens as in generation to many as in
a prompt. Each call has other tokens than the last ones, so that weights come from memory. *bf16*: weights as they are,
which transformers' `grouped_mm`, vLLM, zentorch and KTransformers have as well. *codes*: NF4, INT8, FP8 and MXFP4,
beside vLLM's kernel of as many bits; its int4 and int8 quantize tokens too, which trimtab does not. *step*: a training
step of adapters of rank 16 on the experts of a 3-layer Qwen3-MoE whose base is frozen, as `python -m benchmarks step`
builds it, beside peft over `grouped_mm`, and over KTransformers, the only other project here with a backward; *peak
memory* is the most that a contestant's process held. How the other projects' wheels are installed, and which, is said
in `benchmarks/frozen_peers.py`; one that is not here is a row with its reason.

All contestants hold the same weights, of values that every format holds exactly, and are judged by the same layer in
float64: 1e-2 of the largest output, 4e-2 for codes. zentorch puts weights in its own order at the first call that
reaches all experts; it gets copies, and one prompt first. In brackets: how fast weights, codes and scales were read, if
each expert's are read once. *machine reads* sums memory in the same turns. *x* is a median over turns.

Legend: T tokens, K experts per token, D model dim, F expert hidden dim, b experts that are drawn; the others repeat
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import frozen_peers as peers
from benchmarks.contestant import Contestant
from benchmarks.frozen_ktransformers import ktransformers_bf16
from benchmarks.layer_builds import alone, qwen_experts
from benchmarks.layer_case import LayerCase
from benchmarks.layer_step import Layer
from benchmarks.layer_truth import compare
from benchmarks.quantized import UNIT, coded
from benchmarks.race import Judge
from benchmarks.result import COPY, Entry, Race, Record
from benchmarks.step import STEP
from benchmarks.subject import Subject, Where
from benchmarks.table import contestants_table, duration, ratio
from benchmarks.task import Task
from trimtab import oracle
from trimtab.experts.quantized import in_huge_pages

KINDS = ("bf16", "codes", "step")
DRAWN = 8
"""Experts."""
JUDGED = 64
"""Rows of a call, at most."""
BOUNDS = {"bf16": 1e-2, "codes": 4e-2}
READ_BYTES = 2**29
"""More than twice the largest caches."""
MANY = 2_048
"""Tokens from which a quarter of the experts race: a training step's, where memory matters less than products."""
FEW = 64
"""Tokens up to which reading weights takes the time."""
PACKED = "trimtab, packed"
RACERS = {
    "bf16": (
        ("trimtab, plain", "ours", "bf16", 16), (PACKED, "ours", "bf16", 16),
        ("transformers, grouped_mm", "peer", "bf16", 16), ("vLLM, cpu_fused_moe", "peer", "bf16", 16),
        ("zentorch", "peer", "bf16", 16), ("KTransformers", "peer", "bf16", 16),
    ),
    "codes": (
        (PACKED, "ours", "bf16", 16), ("trimtab, nf4", "ours", "4 bits", 4.5), ("trimtab, int8", "ours", "int8", 8),
        ("trimtab, fp8", "ours", "fp8", 8), ("trimtab, mxfp4", "ours", "4 bits", 4.25),
        ("vLLM, int4", "peer", "4 bits", 4.16), ("vLLM, int8", "peer", "int8", 8), ("vLLM, fp8", "peer", "fp8", 8),
        ("vLLM, mxfp4", "peer", "4 bits", 4.25),
    ),
}  # fmt: skip
"""Who races: name, role, group, bits of a weight with its scales."""
PEERS: dict[str, Callable[..., Layer]] = {
    "vLLM, cpu_fused_moe": peers.vllm_bf16,
    "zentorch": peers.zentorch_bf16,
    "KTransformers": ktransformers_bf16,
    **{f"vLLM, {name}": peers.vllm_codes(name) for name in ("int4", "int8", "fp8", "mxfp4")},
}


def frozen_task(shape: tuple[int, int, int, int], *, tokens: Sequence[int], kind: str, threads: int) -> Task:
    """One race of a kind of weights over all these numbers of tokens."""
    case = LayerCase.shaped(shape, tokens=max(tokens), dtype="bf16")
    contestants = [
        Contestant(
            name=name, role=role, group=group, build=f"{__name__}:build", threads=threads,
            args=case.as_args(who=name, counts=list(tokens), bits=bits),
        )
        for name, role, group, bits in RACERS[kind]
    ]  # fmt: skip
    reads = Contestant(
        name="machine reads", role="bandwidth", build="benchmarks.limits:build_read", threads=threads,
        args={"bytes": READ_BYTES},
    )  # fmt: skip
    return Task(
        part="frozen",
        case={"shape": list(shape), "dtype": kind, "counts": list(tokens), "threads": threads},
        contestants=[*contestants, reads],
        modes=[*map(mode_of, tokens), COPY],
        make_judge=lambda: layer_judge(BOUNDS[kind]),
    )


def mode_of(tokens: int) -> str:
    return f"{tokens:,} tokens" if tokens > 1 else "1 token"


class Drawn:
    """Weights of the experts that are drawn, and the inputs of calls."""

    def __init__(self, case: LayerCase) -> None:
        self.case, self.generator = case, torch.Generator().manual_seed(5)
        F, D = case.hidden, case.dim
        self.up_bID, self.down_bDF = (
            (torch.randint(-1, 2, shape, generator=self.generator, dtype=torch.int8) * UNIT).bfloat16()
            for shape in ((DRAWN, 2 * F, D), (DRAWN, D, F))
        )

    def spread(self, drawn: Tensor) -> Tensor:
        return drawn[torch.arange(self.case.num_experts) % DRAWN]

    def calls(self, tokens: int, ids_dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(x_TD, ids_TK, w_TK) of calls that follow one another, the same for whoever asks."""
        generator, case = torch.Generator().manual_seed(tokens), self.case
        found = []
        for _ in range(max(2, 16 // tokens)):
            x_TD = torch.randn(tokens, case.dim, generator=generator).bfloat16()
            ids_TK = torch.rand(tokens, case.num_experts, generator=generator).topk(case.top_k, 1).indices
            found.append((x_TD, ids_TK.to(ids_dtype), torch.rand(tokens, case.top_k, generator=generator)))
        return found

    def truth(self, tokens: int) -> Tensor:
        """In float64, of some rows of the first call."""
        x_TD, ids_TK, w_TK = (judged(t) for t in self.calls(tokens, torch.int64)[0])
        return oracle.moe(x_TD, ids_TK % DRAWN, w_TK, self.up_bID, self.down_bDF)


def judged(rows: Tensor) -> Tensor:
    """Those of all rows, evenly, that are compared."""
    return rows[:: -(-len(rows) // JUDGED)]


def layer_judge(bound: float) -> Judge:
    """The truth of each number of tokens is computed once."""
    known: dict[str, Tensor] = {}

    def judge(contestant: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
        if not known:
            drawn = Drawn(LayerCase.of(contestant.args))
            known.update({mode_of(tokens): drawn.truth(tokens) for tokens in contestant.args["counts"]})
        return compare(outcomes, [known], bound)

    return judge


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: the case, `who`, `counts` of tokens, `bits` of a weight."""
    case, who = LayerCase.of(args), args["who"]
    drawn = Drawn(case)
    if who in PEERS:
        layer = PEERS[who](case, drawn.up_bID, drawn.down_bDF, drawn.spread)
    elif who.startswith("trimtab"):
        layer = ours(who.partition(", ")[2], drawn)
    else:
        layer, _ = qwen_experts(case, "grouped_mm", (drawn.spread(drawn.up_bID), drawn.spread(drawn.down_bDF)))
    ids_dtype = torch.int32 if who.startswith(("vLLM", "zentorch")) else torch.int64
    calls = {mode_of(tokens): drawn.calls(tokens, ids_dtype) for tokens in args["counts"]}

    def step(turns: Iterator[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        with torch.no_grad():
            return layer(*next(turns))

    def outcome() -> dict[str, Tensor]:
        return {mode: judged(step(iter(first))) for mode, first in calls.items()}

    one_expert = 3 * case.dim * case.hidden * args["bits"] / 8
    read = {
        mode: one_expert * median(len(ids_TK.unique()) for _, ids_TK, _ in some)
        for mode, some in calls.items()
        if len(some[0][0]) <= FEW
    }
    modes = {mode: partial(step, cycle(some)) for mode, some in calls.items()}
    return Subject(modes=modes, outcome=outcome, facts={"read": read}, rest=0.1 if who == "KTransformers" else 0.0)


def ours(form: str, drawn: Drawn) -> Layer:
    """`ExpertMLP` on weights as they are ("plain"), packed, or on codes, those of checkpoints as well."""
    case = drawn.case
    if form in ("plain", "packed"):
        experts: Any = alone(case, "auto", (drawn.spread(drawn.up_bID), drawn.spread(drawn.down_bDF)))[0]
        experts.requires_grad_(False)
        return experts if form == "plain" else experts.quantize_(form)
    experts, _ = alone(case, "auto", (drawn.up_bID, drawn.down_bDF))
    experts.codes = form, torch.bfloat16
    for name in ("gate_up", "down"):
        for key, tensor in zip((name, f"{name}_scales"), coded(getattr(experts, name).float(), form), strict=True):
            setattr(experts, key, nn.Parameter(drawn.spread(tensor), requires_grad=False))
            in_huge_pages(getattr(experts, key))
    return experts


def frozen_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """A row of times for each contestant; then ours over the fastest peer of their group, and codes over packed. Of a
    step what others' tables have, then ours over plain."""
    if "counts" not in record.case:
        return _step_table(record)
    race, modes = record.races[0], [mode for mode in record.settings["modes"] if mode != COPY]
    rows = []
    for entry in race.entries:
        cells = [_timed(race, entry, mode) for mode in modes] if entry.failed is None else [entry.failed]
        rows.append([entry.name, *cells, *[""] * (len(modes) - len(cells))])
    ours = [entry for entry in race.entries if entry.role == "ours" and entry.failed is None]
    over = [[f"{entry.name}, x fastest peer", *(_over_peers(race, entry, m) for m in modes)] for entry in ours]
    rows += [row for row in over if any(row[1:])]
    for packed in [entry for entry in ours if entry.name == PACKED]:
        rows += [
            [f"{entry.name}, x packed", *(ratio(race.times(entry, mode, packed)) for mode in modes)]
            for entry in ours
            if entry is not packed
        ]
    return ["contestant", *modes], rows


def _step_table(record: Record) -> tuple[list[str], list[list[str]]]:
    header, rows = contestants_table(record)
    race, (plain, *others) = record.races[0], [e for e in record.races[0].entries if e.role == "ours"]
    over = [[STEP, f"{e.name}, x plain", ratio(race.times(e, STEP, plain))] for e in others]
    return header, rows + [[*row, *[""] * (len(header) - len(row))] for row in over]


def _timed(race: Race, entry: Entry, mode: str) -> str:
    if entry.role == "bandwidth":
        return f"{(race.bandwidth() or 0) / 1e9:.1f} GB/s"
    seconds = race.median(entry, mode)
    read = entry.facts["read"].get(mode)
    return duration(seconds) + (f" ({read / seconds / 1e9:.0f} GB/s)" if read and seconds else "")


def _over_peers(race: Race, entry: Entry, mode: str) -> str:
    """Over the peer that it takes longest over, and that peer's name."""
    peers = [e for e in race.entries if e.role == "peer" and e.group == entry.group]
    found = [(times, e.name) for e in peers if (times := race.times(entry, mode, e)) is not None]
    return "" if not found else f"{max(found)[0]:.2f} ({max(found)[1]})"
