"""What an optimizer prints: which parameter is how many matrices of what size, and what Newton-Schulz costs a step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def described(optimizer: Any) -> str:
    """Lines on a `Muon` for people. Parameters whose names differ in numbers alone are one line."""
    lines = [f"{type(optimizer).__name__} ("]
    for group in optimizer.param_groups:
        options = [name for name in ("lr", "weight_decay", "momentum") if name != "momentum" or group["rule"] == "muon"]
        said = ", ".join(f"{name} {float(group[name]):g}" for name in options)
        lines.append(f"  {group['rule']}: {len(group['params'])} parameters, {said}")
        alike: dict[str, int] = {}
        for param in group["params"]:
            name, layout, what = optimizer.found(param)
            parts = layout.matrices(param.shape) if layout is not None and group["rule"] == "muon" else []
            size = " + ".join(f"{count:,} x [{outs}, {ins}]" for count, outs, ins in parts) or str(list(param.shape))
            line = f"{_NUMBERS.sub('*', name)}: {size} ({what})"
            alike[line] = alike.get(line, 0) + 1
        lines += [f"    {f'{count} x ' * (count > 1)}{line}" for line, count in alike.items()]
    muons = [p for group in optimizer.param_groups if group["rule"] == "muon" for p in group["params"]]
    flops = newton_schulz_flops(optimizer, muons)
    rows = flops / (6 * max(1, sum(param.numel() for param in muons)))
    return "\n".join([
        *lines, f"  Newton-Schulz: {flops:.3g} FLOPs a step, what forward and backward of these weights are for",
        f"  {rows:,.0f} rows each (rows of an expert: tokens a step x experts per token / experts)", ")",
    ])  # fmt: skip


def newton_schulz_flops(optimizer: Any, params: Iterable[Tensor]) -> int:
    """What the iteration does in a step for the matrices of these parameters, counted without data."""
    counts = Counter[tuple[int, int]]()
    for param in params:
        layout = optimizer.found(param).layout
        for count, outs, ins in layout.matrices(param.shape) if layout is not None else ():
            counts[outs, ins] += count
    total = 0
    for shape, count in counts.items():
        with FlopCounterMode(display=False) as counter:
            optimizer.newton_schulz(torch.empty(1, *shape, device="meta"), optimizer.coefficients, optimizer.ns_dtype)
        total += count * counter.get_total_flops()
    return total
