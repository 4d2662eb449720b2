"""What an optimizer prints: which parameter is how many matrices of what size, and what Newton-Schulz costs a step."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def described(optimizer: Any) -> str:
    """Lines on a `Muon` for people. Parameters whose names differ in numbers alone are one line."""
    lines, flops, values = [f"{type(optimizer).__name__} ("], 0, 0
    for group in optimizer.param_groups:
        muons = group["rule"] == "muon"
        said = ", ".join(f"{name} {float(group[name]):g}" for name in ("lr", "weight_decay", "momentum")[: 2 + muons])
        lines.append(f"  {group['rule']}: {len(group['params'])} parameters, {said}")
        alike = Counter[str]()
        for param in group["params"]:
            name, layout, what = optimizer.found(param)
            parts = layout.matrices(param.shape) if muons else []
            size = " + ".join(f"{count:,} x [{outs}, {ins}]" for count, outs, ins in parts) or str(list(param.shape))
            alike[f"{_NUMBERS.sub('*', name)}: {size} ({what})"] += 1
            values += param.numel() * muons
            for count, *shape in parts:
                m, n = sorted(shape)
                flops += count * len(optimizer.coefficients) * (4 * m * m * n + 2 * m**3)
        lines += [f"    {f'{count} x ' * (count > 1)}{line}" for line, count in alike.items()]
    rows = flops / (6 * max(1, values))
    return "\n".join([
        *lines, f"  Newton-Schulz, plain: {flops:.3g} FLOPs a step, what forward and backward of these weights",
        f"  are for {rows:,.0f} rows each (rows of an expert: tokens a step x experts per token / experts)", ")",
    ])  # fmt: skip
