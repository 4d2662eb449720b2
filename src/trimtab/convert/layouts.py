"""How an experts module of transformers lays its weights out, as a value that can be written down and compared.

Taken from the parameters' shapes, the flags of the class and, for the gate, from the arithmetic itself: which inputs
an output of the gate depends on says how gate and up are packed, and it bends along the gate alone.

Legend: E experts, D model dim, F expert hidden dim, I = 2F with a gate, else F.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.checkpoint.state import is_transformers_experts
from trimtab.errors import ConfigError

Packing = Literal["gate|up", "up|gate", "gate,up,gate,up", "up,gate,up,gate", "up"]


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The layout of one experts module.

    experts, dim, hidden: E, D and F.
    up, down: the parameters' names. up_axes, down_axes: what their dims are, by the legend.
    packing: what lies along I: gate and up as halves, in this order, or as neighbours; or up alone.
    bias: whether there are biases, [E, I] and [E, D].
    """

    experts: int
    dim: int
    hidden: int
    up: str
    up_axes: tuple[str, str, str]
    down: str
    down_axes: tuple[str, str, str]
    packing: Packing
    bias: bool

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self) | {"up_axes": list(self.up_axes), "down_axes": list(self.down_axes)}

    def __str__(self) -> str:
        up, down = ", ".join(self.up_axes), ", ".join(self.down_axes)
        sizes = f"E {self.experts}, D {self.dim}, F {self.hidden}"
        return f"{self.up} [{up}], I = {self.packing}; {self.down} [{down}]; {'biases; ' if self.bias else ''}{sizes}"


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that run through transformers' experts registry, by qualified name."""
    return {name: module for name, module in model.named_modules() if is_transformers_experts(module)}


def layout_of(module: nn.Module, name: str = "") -> ExpertLayout:
    """The layout of an experts module, on any device. name: its own, for errors.

    Raises:
        ConfigError: its shapes do not fit its flags, or its gate does not work as its flags say.
    """
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, up_name, None), getattr(module, "down_proj", None)
    if not isinstance(up, Tensor) or not isinstance(down, Tensor) or up.dim() != 3 or down.dim() != 3:
        raise ConfigError(f"{name or type(module).__name__}: no stacked {up_name} and down_proj to convert")
    packing = gate_packing(module) if module.has_gate else "up"
    hidden_axis = 1 if module.is_transposed else 2
    experts, dim, hidden = down.shape[0], down.shape[3 - hidden_axis], down.shape[hidden_axis]
    width = hidden * 2 if module.has_gate else hidden
    wanted = (experts, dim, width) if module.is_transposed else (experts, width, dim)
    if tuple(up.shape) != wanted or (packing in ("gate|up", "up|gate")) != bool(
        module.is_concatenated and module.has_gate
    ):
        raise ConfigError(
            f"{name or type(module).__name__}: {up_name} {list(up.shape)} with {packing}, but its flags say "
            f"{list(wanted)}, {'concatenated' if module.is_concatenated else 'interleaved'}"
        )
    return ExpertLayout(
        experts=int(experts),
        dim=int(dim),
        hidden=int(hidden),
        up=up_name,
        up_axes=("E", "D", "I") if module.is_transposed else ("E", "I", "D"),
        down="down_proj",
        down_axes=("E", "F", "D") if module.is_transposed else ("E", "D", "F"),
        packing=packing,
        bias=bool(module.has_bias),
    )


def gate_packing(module: nn.Module) -> Packing:
    """Where gate and up lie among the inputs of a module's gate, found by running it. Raises ConfigError if nowhere."""
    apply_gate: Any = module._apply_gate
    pairs = 4
    point = torch.linspace(-1.1, 1.2, 2 * pairs, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return apply_gate(x[None])[0].double()  # type: ignore[no-any-return]

    with torch.no_grad():
        middle, steps = run(point), torch.eye(2 * pairs, dtype=torch.float64)
        lower, upper = (torch.stack([run(point + sign * 2 * step) for step in steps]) for sign in (-1, 1))  # [2p, p]
        mirrored = torch.stack([run(point * (1 - 2 * step)) for step in steps])
    depends = (lower != middle) | (upper != middle)
    # Along up it is a straight line, or odd where up is capped; along the gate it is neither.
    bends = ((lower + upper - 2 * middle).abs() > 1e-6) & ((mirrored + middle).abs() > 1e-6)
    halves = torch.eye(pairs, dtype=torch.bool).repeat(2, 1)
    neighbours = torch.eye(pairs, dtype=torch.bool).repeat_interleave(2, 0)
    first = torch.arange(2 * pairs) < pairs
    even = torch.arange(2 * pairs) % 2 == 0
    ways: tuple[tuple[Packing, Tensor, Tensor], ...] = (
        ("gate|up", halves, first), ("up|gate", halves, ~first),
        ("gate,up,gate,up", neighbours, even), ("up,gate,up,gate", neighbours, ~even),
    )  # fmt: skip
    for packing, pairing, gate in ways:
        if torch.equal(depends, pairing) and torch.equal(bends, pairing & gate[:, None]):
            return packing
    raise ConfigError(f"{type(module).__name__}: its gate takes gate and up neither as halves nor as neighbours")
