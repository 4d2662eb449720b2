"""`trimtab decisions`: what a file of routing decisions holds, and where two of them part.

Legend: B sequences, L positions, K experts per token, E experts.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from trimtab.errors import InputError, first_line

if TYPE_CHECKING:
    from trimtab.routing.decisions import Decisions

SHOWN = 16
"""With so many experts or fewer, the load of each is printed; of more, those of the busiest."""

DESCRIPTION = """\
Read a file of routing decisions (`trimtab.Decisions.save`) and print its shape and, for each layer, how evenly the
experts were picked and how many slots found no room. With --other, say where the two files first differ.

  trimtab decisions run.decisions
  trimtab decisions run.decisions --other rerun.decisions

Exit code: 0, or 1 where the two files differ.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command's subparsers."""
    parser = commands.add_parser(
        "decisions",
        help="look into a file of routing decisions, or compare two",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="what `Decisions.save` wrote")
    parser.add_argument("--other", metavar="FILE", help="compare with these")
    parser.add_argument("--json", action="store_true", help="print JSON, with the loads of every expert")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print; returns 1 where two files were compared and differ, else 0."""
    decisions = _load(options.file)
    found = summary(decisions)
    difference = None if options.other is None else compare(decisions, _load(options.other))
    if options.json:
        print(json.dumps(found if options.other is None else found | {"difference": difference}, indent=2))
        return int(difference is not None)
    print(table(found))
    if options.other is not None:
        print(f"\n{options.other}: {describe(difference) if difference else 'the same in every slot'}")
    return int(difference is not None)


def summary(decisions: Decisions) -> dict[str, Any]:
    """Sizes, and for each layer its picks, those dropped, slots without a pick, the loads of its experts and max_vio.

    A pick that found no room counts as load: what an expert was asked to take is what balance is about.
    """
    from trimtab.routing.bias import max_vio
    from trimtab.routing.scores import count_ids

    B, L, _, K = decisions.ids.shape
    layers = []
    for name in decisions.layers:
        choice = decisions.layer(name)
        loads_E = count_ids(choice.chosen, decisions.num_experts)
        layers.append(
            {
                "layer": name,
                "picks": int((choice.chosen >= 0).sum()),
                "dropped": int(((choice.chosen >= 0) & (choice.kept < 0)).sum()),
                "no_pick": int((choice.chosen < 0).sum()),
                "idle": int((loads_E == 0).sum()),
                "max_vio": max_vio(loads_E),
                "loads": loads_E.tolist(),
            }
        )
    sizes = {"sequences": B, "positions": L, "experts_per_token": K, "experts": decisions.num_experts}
    return sizes | {"layers": layers}


def table(found: dict[str, Any]) -> str:
    """A summary, as text."""
    width = max([5, *(len(layer["layer"]) for layer in found["layers"])])
    lines = [
        f"{found['sequences']} sequences of {found['positions']} positions, {len(found['layers'])} layers, "
        f"{found['experts_per_token']} of {found['experts']} experts per token",
        f"{'layer':{width}} {'picks':>9} {'dropped':>8} {'no pick':>8} {'max_vio':>8} {'idle':>5}  loads",
    ]
    for layer in found["layers"]:
        loads = layer["loads"]
        shown = " ".join(map(str, loads))
        if len(loads) > SHOWN:
            busiest = sorted(range(len(loads)), key=lambda e: -loads[e])[:4]
            shown = f"{min(loads)} to {max(loads)}; busiest " + ", ".join(f"{e}: {loads[e]}" for e in busiest)
        lines.append(
            f"{layer['layer']:{width}} {layer['picks']:9} {layer['dropped']:8} {layer['no_pick']:8} "
            f"{layer['max_vio']:8.3f} {layer['idle']:5}  {shown}"
        )
    return "\n".join(lines)


def compare(one: Decisions, other: Decisions) -> dict[str, Any] | None:
    """The first difference, by sequence, position, layer and k, and how many there are; None where there is none.

    Of decisions of different sizes or layers: {"what": both, in words}.
    """
    for what, a, b in (
        ("sequences, positions, layers, k", tuple(one.ids.shape), tuple(other.ids.shape)),
        ("experts", one.num_experts, other.num_experts),
        ("layers", one.layers, other.layers),
    ):
        if a != b:
            return {"what": f"{what}: {a} and {b}"}
    ids, others = one.ids.long(), other.ids.long()
    differs = ids != others
    if not differs.any():
        return None
    b, t, layer, k = (int(i) for i in differs.nonzero()[0])
    same_set = ids[b, t, layer].sort().values.equal(others[b, t, layer].sort().values)
    return {
        "sequence": b, "position": t, "layer": one.layers[layer], "k": k, "same_experts": same_set,
        "here": ids[b, t, layer].tolist(), "there": others[b, t, layer].tolist(),
        "slots": int(differs.sum()), "of_slots": ids.numel(),
        "tokens": int(differs.flatten(2).any(-1).sum()), "of_tokens": ids.shape[0] * ids.shape[1],
    }  # fmt: skip


def describe(difference: dict[str, Any]) -> str:
    """A difference, as text."""
    if "what" in difference:
        return f"not comparable, {difference['what']}"
    d = difference
    order = ", the same experts in another order" if d["same_experts"] else ""
    return (
        f"first differs at sequence {d['sequence']}, position {d['position']}, layer {d['layer']}, k {d['k']}: "
        f"{_words(d['here'])} and {_words(d['there'])}{order}\n"
        f"{d['slots']} of {d['of_slots']} slots differ, in {d['tokens']} of {d['of_tokens']} tokens"
    )


def _words(ids: list[int]) -> str:
    """Experts of one token; -1 is no pick, -2 - e is e without room."""
    return "[" + ", ".join("none" if i == -1 else f"{-2 - i} dropped" if i < -1 else str(i) for i in ids) + "]"


def _load(path: str) -> Decisions:
    from trimtab.routing.decisions import Decisions

    try:
        return Decisions.load(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except InputError as error:
        raise InputError(first_line(error)) from error
    except Exception as error:  # whatever bytes that are no such file make of unpickling
        raise InputError(f"{path} is no file of routing decisions ({type(error).__name__})") from error
