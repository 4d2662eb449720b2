"""What a recorded collective is in MoE words, read off its stack: phase, direction, layer.

    count      exchange of counts before rows move            dispatch   rows out to the experts; backward: home
    combine    rows home; backward: out to the experts        shard      sequence shards put together
    check before dispatch or combine: the guard's own exchange, so that no rank moves rows unless all are there

Other collectives of a training step are named too: FSDP's, DDP's, transformers' own expert exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trimtab.dispatch import LAYER_FILE
from trimtab.doctor.flight_recorder import Entry, Frame


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a step a collective is. phase "" outside of trimtab's layers; layer "" where it is not recorded.

    rows: whether rows move, whose number may differ between ranks; else all ranks bring the same sizes.
    """

    what: str
    phase: str = ""
    rows: bool = False
    backward: bool = False
    layer: str = ""
    at: str = ""

    def __str__(self) -> str:
        direction = f", {'backward' if self.backward else 'forward'}" if self.phase else ""
        layer = f", layer {self.layer}" if self.layer else ""
        return f"{self.what}{direction}{layer}{f' ({self.at})' if self.at else ''}"


def place_of(entry: Entry) -> Place:
    """The place of a collective. Without frames (JSON dumps) only the collective's own name is known."""
    inside = {(_file_of_trimtab(f.file), f.name) for f in entry.frames}
    names = {name for file, name in inside if file.startswith("dispatch/")}
    maps = {name for file, name in inside if file == "dispatch/route.py"}
    # Of our own functions: below a forward that is computed again lies torch's backward.
    backward = any(file.startswith("dispatch/") and name == "backward" for file, name in inside)
    layer = next((f.name for f in entry.frames if f.file == LAYER_FILE), "")
    at = _users(entry.frames)
    out, home = "dispatch" in maps, bool(maps & {"combine", "combine_slots"})
    phase = "dispatch" if out != backward else "combine"
    if names & {"join_shards", "unshard", "take_shard"}:
        return Place(what="sequence shards put together", phase="shard", backward=backward, layer=layer, at=at)
    if "handshake" in names and out == home:
        return Place(what="exchange of counts", phase="count", layer=layer, at=at)
    if "handshake" in names:
        return Place(what=f"check before {phase}", phase=phase, backward=backward, layer=layer, at=at)
    if out != home:
        return Place(what=phase, phase=phase, rows=True, backward=backward, layer=layer, at=at)
    return Place(what=_other(entry), layer=layer, at=at)


def _other(entry: Entry) -> str:
    """What is not an exchange of ours."""
    backward = any(f.name == "backward" for f in entry.frames)
    files = [f.file for f in entry.frames]
    if any("transformers/" in file and "expert_parallel" in file for file in files):
        return f"transformers' own expert exchange, {'backward' if backward else 'forward'} ({entry.op})"
    if any("fsdp" in file for file in files):
        kind = {"all_gather": "gathers parameters", "reduce_scatter": "scatters gradients"}
        told = next((says for op, says in kind.items() if op in entry.op), "reduces gradients over replicas")
        return f"FSDP {told} ({entry.op})"
    if any("clip_grad" in file or "clip_grad" in f.name for file, f in zip(files, entry.frames, strict=True)):
        return f"gradient norm ({entry.op})"
    if any("distributed/checkpoint" in file for file in files):
        return f"checkpoint ({entry.op})"
    if any("nn/parallel/distributed.py" in file for file in files):
        return f"DDP ({entry.op})"
    if "barrier" in entry.op:
        return "barrier"
    if entry.op.startswith(("all_reduce", "allreduce")) and backward:
        return f"all-reduce issued from backward: DDP's gradients, or a hook ({entry.op})"
    return entry.op


def _users(frames: tuple[Frame, ...]) -> str:
    """The innermost line that is neither torch's nor ours nor another library's: where the user's code called."""
    library = ("site-packages/", "dist-packages/", "/torch/", "<", "lib/python")
    users = (f for f in frames if not any(part in f.file for part in library) and not _file_of_trimtab(f.file))
    mine = next(users, None)
    return f"{mine.file.rpartition('/')[2]}:{mine.line} {mine.name}" if mine else ""


def _file_of_trimtab(file: str) -> str:
    """A file of this package by its path in it, wherever the host that wrote the dump has it; "" for any other file.

    A folder called trimtab may also be a checkout's or a project of the user's: what lies in it decides.
    """
    inside = file.rpartition("/trimtab/")[2]
    return inside if inside != file and inside in _files() else ""


@cache
def _files() -> frozenset[str]:
    package = Path(__file__).parents[1]
    return frozenset(file.relative_to(package).as_posix() for file in package.rglob("*.py"))
