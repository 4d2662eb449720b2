"""The page of a run: verdicts, what was decided, and the numbers. Written anew after each stage, of what is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.layers import DEFAULT, FUSED, SHAPES, TOKENS
from benchmarks.subject import BOTH, FORWARD
from benchmarks.table import as_markdown

BAR = 1.25
"""How much faster the fused products must be than the default, forward and backward, to stay."""
RULE = (
    f'The fused Triton products (kernels "{FUSED}") stay where a GPU has shown them at {BAR} times the speed of '
    f'PyTorch\'s grouped GEMM with Triton between ("{DEFAULT}"), forward and backward of {TOKENS[-1]:,} tokens, on '
    "every shape, with right numbers. Until then they are an option by name."
)


def measured(out: Path) -> dict[str, dict[str, Any]]:
    """Stage -> what it found."""
    return {path.stem.partition("_")[2]: json.loads(path.read_text()) for path in sorted(out.glob("[0-9]_*.json"))}


def decision(run: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    """What the rule says of this GPU, in one sentence."""
    if run["device"] != "cuda":
        return "Not decided: a rehearsal on the CPU."
    status = {one["stage"]: one["status"] for one in run["outcomes"]}
    if "failed" in (status.get("kernels"), status.get("layers")):
        return "Not decided, so they stay an option by name: the numbers of this run are not right, see the verdicts."
    rows = found.get("layers", {}).get("rows", [])
    ms = {(row["shape"], row["name"]): row["ms"][BOTH] for row in rows if row["tokens"] == TOKENS[-1] and "ms" in row}
    pairs = {shape: [ms.get((shape, f"trimtab {name}")) for name in (DEFAULT, FUSED)] for shape in SHAPES}
    ratios = {shape: default / fused for shape, (default, fused) in pairs.items() if default and fused}
    said = ", ".join(f"{ratio:.2f} ({shape})" for shape, ratio in ratios.items())
    if status.get("kernels") != "ok" or len(ratios) < len(SHAPES):
        return f"Not decided, so they stay an option by name: not every shape was raced{f'; {said}' if said else ''}."
    if min(ratios.values()) >= BAR:
        return f"They stay, and are the faster choice on this GPU: {said} times."
    if max(ratios.values()) < BAR:
        return f"They go: {said} times, below {BAR} on every shape."
    return f"They stay an option by name: {said} times, {BAR} on some shapes alone."


def page(out: Path) -> str:
    """Markdown."""
    run, found = json.loads((out / "run.json").read_text()), measured(out)
    machine = found.get("machine", {})
    parts = [
        "# A GPU, measured",
        f"`python -m benchmarks gpu --minutes {run['minutes']:g}{'' if run['device'] == 'cuda' else ' --device cpu'}`",
        f"{machine.get('device', 'No device was described')}. {machine.get('words', '')}. Revision "
        f"{machine.get('machine', {}).get('revision') or 'unknown (a copy of the tree)'}.",
        as_markdown(("stage", "says", "verdict", "s"),
               [(o["stage"], o["status"], o["verdict"], f"{o['seconds']:.0f}") for o in run["outcomes"]]),
        f"## Decided\n\n{RULE}\n\n**{decision(run, found)}**",
    ]  # fmt: skip
    if rows := found.get("layers", {}).get("rows"):
        parts.append("## Layers")
        parts.append("Median of turns, by CUDA events; weights shared between contestants; memory beyond what was "
                     "there before a step, gradients of weights included.")  # fmt: skip
        parts.append(as_markdown(
            ("shape", "tokens", "contestant", "forward, ms", "TFLOP/s", "forward+backward, ms", "TFLOP/s", "peak, GiB"),
            [_layer(row) for row in rows],
        ))  # fmt: skip
    if backends := found.get("profile", {}).get("backends"):
        parts.append(f"## One step, {found['profile']['shape']}, {found['profile']['tokens']:,} tokens")
        parts.append(as_markdown(
            ("contestant", "launches", "host waits", "kernels, ms", "the longest (times, ms)"),
            [_profile(name, one) for name, one in backends.items()],
        ))  # fmt: skip
    if tiles := found.get("tiles", {}).get("rows"):
        parts.append(f"## Tiles, {found['tiles']['tokens']:,} tokens")
        parts.append(as_markdown(
            ("launch", "tiles", "ships", "ms", "TFLOP/s"),
            [(r["launch"], r["tiles"], "yes" if r["ships"] else "", *_rate(r)) for r in tiles],
        ))  # fmt: skip
    if plans := found.get("plan", {}).get("rows"):
        parts.append("## Plans of a step's memory, GiB")
        parts.append(as_markdown(
            ("case", "planned", "allocated", "off", "reserved", "outside of the allocator"), list(map(_plan, plans))
        ))  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _layer(row: dict[str, Any]) -> Sequence[str]:
    who = (row["shape"], f"{row['tokens']:,}", row["name"])
    if "ms" not in row:
        return (*who, row["failed"], "", "", "", "")
    times = [text for mode in (FORWARD, BOTH) for text in (f"{row['ms'][mode]:.3f}", f"{row['teraflops'][mode]:.0f}")]
    return (*who, *times, "" if row.get("peak") is None else f"{row['peak'] / 2**30:.2f}")


def _profile(name: str, one: dict[str, Any]) -> Sequence[str]:
    if "launches" not in one:
        return (name, one["failed"], "", "", "")
    longest = "; ".join(f"`{kernel[:48]}` ({count}, {ms:.3f})" for kernel, count, ms in one["kernels"][:5])
    return (name, str(one["launches"]), str(one["waits"]), f"{one['ms']:.3f}", longest)


def _plan(row: dict[str, Any]) -> Sequence[str]:
    planned = f"{row['plan'] / 2**30:.2f}"
    if "allocated" not in row:
        return (row["case"], planned, "not counted on the CPU", "", "", "")
    sizes = [f"{row[name] / 2**30:.2f}" for name in ("allocated", "reserved", "outside")]
    return (row["case"], planned, sizes[0], f"{row['plan'] / row['allocated'] - 1:+.1%}", *sizes[1:])


def _rate(row: dict[str, Any]) -> tuple[str, str]:
    return (f"{row['ms']:.3f}", f"{row['teraflops']:.0f}") if "ms" in row else (row["failed"], "")
