"""One step in stages: fixed places of forward, backward and optimizer, whose bytes are affine in the number of layers.

The peak of a step is the highest of its stages, so it is convex in the number of layers, not affine: each stage is
extrapolated by itself, at each of its operators where one layer more makes no more of them. The stages are

    forward                        from the last layer's begin to the loss
    backward of the head           to the gradient of the last layer's output
    backward of the last layer     to that of its input; of the first, second and last layer of each kind
    backward of the first layer    to the end
    optimizer                      clipping and the step

A kind of layer is its modules, the shapes of their parameters, and what the configuration says of each layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.plan.device import DEVICES, Device
from trimtab.plan.ledger import CATEGORIES, FORWARD, Ledger
from trimtab.plan.without_values import World

LAYERS, HEAD, BETWEEN, OPTIMIZER = f"{FORWARD} of layers", "backward of the head", "backward of layers", "optimizer"
DENSE = ("first_k_dense_replace", "num_dense_layers")
"""Names that configurations have for the number of first layers of another kind."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a loop does with a model: the `loss` of one micro-batch, of which a step has `grad_accum`; `clip` the
    gradients; and step the `optimizer`, which is made once. All are called under the world's mode."""

    loss: Callable[[], Tensor]
    optimizer: Callable[[], torch.optim.Optimizer]
    clip: Callable[[], object] = lambda: None
    grad_accum: int = 1


class Points(NamedTuple):
    """Names of operators, and the bytes at the most from each to the next one, [operator, category]."""

    names: list[str]
    bytes: Tensor


@dataclass(frozen=True)
class Stages:
    """points: of each stage. flops: of the step. moved: bytes that each collective is given in the step."""

    points: dict[str, Points]
    flops: int
    moved: Counter[str]
    ledger: Ledger | None = field(default=None, repr=False)

    @property
    def parts(self) -> dict[str, dict[str, int]]:
        """stage -> category -> bytes, where the stage has the most."""
        tops = {name: points.bytes[points.bytes.sum(1).argmax()] for name, points in self.points.items()}
        return {name: dict(zip(CATEGORIES, top.tolist(), strict=True)) for name, top in tops.items()}

    @property
    def peak(self) -> tuple[str, int]:
        """The stage with the most bytes, and these."""
        return max(((name, sum(parts.values())) for name, parts in self.parts.items()), key=lambda pair: pair[1])


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules in the model, the outermost of several. Raises ConfigError if there is none."""
    lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not any(lists):
        raise ConfigError(f"{type(model).__name__}: no list of layers in it, nn.ModuleList, whose stages are planned")
    return max(lists, key=len)


def kinds_of(model: Any) -> list[Hashable]:
    """The kind of each layer of a model that is not sharded."""
    layers = layers_of(model)
    said = _by_layer(model.config.get_text_config(), len(layers)) if hasattr(model, "config") else {}
    return [
        (
            tuple((name, type(module).__name__) for name, module in layer.named_modules()),
            tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters()),
            tuple((name, str(values[i])) for name, values in said.items()),
        )
        for i, layer in enumerate(layers)
    ]


def few_layers(source: Any, chosen: Sequence[int]) -> Any:
    """A configuration of transformers with these layers alone. Whether they are of the same kinds is for the caller to
    see: families say it in many ways."""
    made = deepcopy(source)
    config = made.get_text_config()
    for name, values in _by_layer(config, config.num_hidden_layers).items():
        setattr(config, name, [values[i] for i in chosen])
    for name in DENSE:
        if getattr(config, name, None):
            setattr(config, name, sum(i < getattr(config, name) for i in chosen))
    config.num_hidden_layers = len(chosen)
    return made


def _by_layer(config: Any, layers: int) -> dict[str, Sequence[Any]]:
    """The fields of a configuration that say something of each layer."""
    fields = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple)}
    return {name: value for name, value in fields.items() if len(value) == layers and not name.startswith("_")}


def measure(model: nn.Module, step: Step, world: World, *, device: Device = DEVICES["cpu"]) -> Stages:
    """The stages of the second step of a model that was filled: the first one makes moments."""
    ledger = device.ledger()
    model.train()
    with device.as_there(), _hooked(model, ledger), world.mode, ledger:
        ledger.know([*model.parameters(), *model.buffers()], "weights")
        optimizer = step.optimizer()
        _step(step, optimizer, ledger)
        before = ledger.flops
        ledger.moved.clear()
        begin = _step(step, optimizer, ledger)
    spans = [(name, since, until) for (name, since), (_, until) in pairwise(ledger.phases[begin:])]
    points = {name: _points(ledger, *times) for name, *times in spans if name not in (LAYERS, BETWEEN)}
    return Stages(points, ledger.flops - before, ledger.moved, ledger)


def _step(step: Step, optimizer: torch.optim.Optimizer, ledger: Ledger) -> int:
    """Returns the number of the phase in which the last micro-batch begins."""
    begin = 0
    for _ in range(step.grad_accum):
        begin, ledger.phase = len(ledger.phases), LAYERS
        loss = step.loss()
        ledger.phase = HEAD
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    ledger.phase = OPTIMIZER
    step.clip()
    optimizer.step()
    optimizer.zero_grad()
    ledger.phase = ""
    return begin


def _names(model: Any, layers: Sequence[nn.Module]) -> dict[int, str]:
    """The stages of backwards of layers, of each kind: the first, the second, before which FSDP2 gathers another layer
    for the last time, and the last."""
    alike = {f" of kind {i}": own for i, own in enumerate(_places(kinds_of(model)).values())}
    found: dict[int, str] = {}
    for name, own in (alike | {"": range(len(layers))}).items():
        places = {own[min(1, len(own) - 1)]: "second", own[-1]: "last", own[0]: "first"}
        found |= {i: f"backward of the {which} layer{name}" for i, which in places.items()}
    return found


@contextmanager
def _hooked(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Have the ledger's phases follow the layers; a recompute's forward is part of the backward."""
    layers = layers_of(model)
    names = _names(model, layers)

    def enter(*_: Any) -> None:
        if ledger.phase == LAYERS:
            ledger.phase = FORWARD

    def leave(name: str, _module: Any, _args: Any, output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else output[0]
        if ledger.phase.startswith(FORWARD) and tensor.requires_grad:
            tensor.register_hook(lambda _: setattr(ledger, "phase", name))

    with ExitStack() as undo:
        for i, each in enumerate(layers):
            undo.callback(each.register_forward_hook(partial(leave, names.get(i, BETWEEN))).remove)
        undo.callback(layers[-1].register_forward_pre_hook(enter).remove)
        yield


def _points(ledger: Ledger, since: int, until: int) -> Points:
    """Of the operators between two times."""
    first, last = (bisect_left(ledger.calls, (time, "")) for time in (since, until))
    calls = [(since, ""), *ledger.calls[first:last], (until, "")]
    times = [ledger.peak(begin, end)[1] for (begin, _), (end, _) in pairwise(calls)]
    return Points([name for _, name in calls[:-1]], ledger.by_category()[times])


def extrapolated(kinds: Sequence[Hashable], run: Callable[[Sequence[int]], Stages]) -> Stages:
    """The stages of a model whose layers are of these kinds, by models of few of them: with two at each end, and with
    one more of each kind.

    run: the stages of a model of these layers alone, by their numbers, of which it is given the first and the last.
    """
    own = _places(kinds)
    ends = {i for places in own.values() for i in (*places[:2], *places[-2:])}
    base = run(sorted(ends))
    points, flops, moved = dict(base.points), base.flops, Counter(base.moved)
    for places in own.values():
        inner = [i for i in places if i not in ends]
        if not inner:
            continue
        more, times = run(sorted({*ends, inner[0]})), len(inner)
        for name, few in base.points.items():
            points[name] = _added(points[name], few, more.points[name], times)
        flops += times * (more.flops - base.flops)
        for name in more.moved:
            moved[name] += times * (more.moved[name] - base.moved[name])
    if any(bool((part.bytes < 0).any()) for part in points.values()):
        return run(range(len(kinds)))  # no fixed places
    return Stages(points, flops, moved, base.ledger)


def _places(kinds: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Which layers are of each kind."""
    return {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in kinds}


def _added(whole: Points, few: Points, more: Points, times: int) -> Points:
    """Operator by operator where they are the same ones, else at the most of all of a name."""
    if not whole.names == few.names == more.names:
        whole, few, more = map(_by_name, (whole, few, more))
    return Points(whole.names, whole.bytes + times * (more.bytes - few.bytes))


def _by_name(points: Points) -> Points:
    tops: dict[str, Tensor] = {}
    for name, row in zip(*points, strict=True):
        if name not in tops or row.sum() > tops[name].sum():
            tops[name] = row
    names = sorted(tops)
    return Points(names, torch.stack([tops[name] for name in names]))
