"""The routing decisions of a model as one value, [B, L, layers, K]: kept, cut, written, read; and how our own routers
are recorded and told. `trimtab.record` and `trimtab.replay` are in `trimtab.decisions`.

Legend: B sequences, L positions, T = B * L tokens, K experts per token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trimtab.atomic_write import whole
from trimtab.errors import InputError
from trimtab.routing.decision import Decision
from trimtab.routing.recompute import replaying
from trimtab.routing.router import Router
from trimtab.validation import holds_ids, wide_ids

FORMAT = "trimtab.decisions"
VERSION = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions:
    """The decisions of every MoE layer for the same tokens: what rollout engines hand over with their samples.

    ids: [B, L, layers, K], int8, int16, int32 or int64: an expert 0..E - 1, -1 for none, -2 - e for an expert e that
        was picked but had no room, so that replayed weights are normalized over the same picks.
    num_experts: E, of every layer.
    layers: the names of the layers, in the order of the third dim.

    Where every pick had room, a layer's are also what `MoE(..., ids=)` takes.

    Raises:
        InputError: shapes, dtypes or ids other than these.
    """

    ids: Tensor
    num_experts: int
    layers: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.ids.dim() != 4 or not holds_ids(self.ids) or not self.ids.dtype.is_signed:
            raise InputError(
                "decisions must be [B, L, layers, K] of int8, int16, int32 or int64, which hold -1 as well, "
                f"got {self.ids.dtype} {tuple(self.ids.shape)}"
            )
        if self.ids.shape[2] != len(self.layers) or len(set(self.layers)) != len(self.layers):
            raise InputError(f"decisions for {self.ids.shape[2]} layers, but the names are {self.layers}")
        ids = wide_ids(self.ids)
        if bool(((ids < -1 - self.num_experts) | (ids >= self.num_experts)).any()):
            low, high = int(ids.min()), int(ids.max())
            raise InputError(
                f"decisions name experts {low}..{high}, the model has 0..{self.num_experts - 1} (-1 for none)"
            )

    def layer(self, name: str) -> Decision:
        """One layer's, as [B * L, K] int64.

        Raises:
            InputError: no such layer.
        """
        if name not in self.layers:
            raise InputError(f"no decisions for layer {name!r}; there are {self.layers}", phase="route")
        ids = self.ids[:, :, self.layers.index(name)].flatten(0, 1).long()
        return Decision(torch.where(ids < -1, -2 - ids, ids), ids.clamp(min=-1))

    def cut(self, start: int, end: int) -> Decisions:
        """Those of the positions start..end - 1 of every sequence: what a rank that holds these replays."""
        return replace(self, ids=self.ids[:, start:end])

    @classmethod
    def join(cls, parts: Sequence[Decisions], dim: int = 1) -> Decisions:
        """Parts put together, along positions (1) or sequences (0).

        Raises:
            InputError: parts of other layers or another number of experts.
        """
        found = [(p.num_experts, p.layers) for p in parts]
        if len(set(found)) != 1:
            raise InputError(f"cannot join decisions of different models, (experts, layers) are {found}")
        return replace(parts[0], ids=torch.cat([p.ids for p in parts], dim))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file that `load` reads; two bytes a slot with less than 32,767 experts. Whole or not at all."""
        ids = self.ids.to("cpu", torch.int16 if self.num_experts < 2**15 - 1 else torch.int32).contiguous()
        content = {"format": FORMAT, "version": VERSION, "ids": ids, "num_experts": self.num_experts}
        with whole(Path(path)) as unfinished:
            torch.save(content | {"layers": list(self.layers)}, unfinished)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Decisions:
        """Read what `save` wrote. Runs no code from the file.

        Raises:
            InputError: not such a file, or of another version.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # what torch.load raises for a file of another kind depends on its first bytes
            raise InputError(f"{path} is no file of routing decisions ({type(error).__name__})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InputError(f"{path} is no file of routing decisions")
        if content.get("version") != VERSION:
            raise InputError(f"{path} has version {content.get('version')}, this trimtab reads {VERSION}")
        missing = {"ids", "num_experts", "layers"} - content.keys()
        if missing:
            raise InputError(f"{path} lacks {sorted(missing)}")
        return cls(ids=content["ids"], num_experts=content["num_experts"], layers=tuple(content["layers"]))


class Recording:
    """What the routers of a model decided, forward by forward.

    num_experts: E by router name.
    """

    def __init__(self, num_experts: dict[str, int]) -> None:
        self.num_experts = num_experts
        self.calls: dict[str, list[Tensor]] = {name: [] for name in num_experts}

    def keep(self, name: str, ids: Tensor) -> None:
        """What router `name` decided in a forward: [B, L, K]."""
        self.calls.setdefault(name, []).append(ids)

    def decisions(self, call: int = -1) -> Decisions:
        """Those of one forward of the model, by default the last.

        Raises:
            InputError: there was no such forward in some layer, or layers differ in tokens, K or E.
        """
        counts = {name: len(calls) for name, calls in self.calls.items()}
        if not all(-count <= call < count for count in counts.values()) or len(set(counts.values())) > 1:
            raise InputError(f"no decisions of forward {call} in every layer; forwards recorded by layer: {counts}")
        picked = {name: calls[call] for name, calls in self.calls.items()}
        kinds = {name: (self.num_experts[base_of(name)], tuple(ids.shape)) for name, ids in picked.items()}
        if len(set(kinds.values())) > 1:
            raise InputError(f"layers differ in (experts, [B, L, K]) and do not make one [B, L, layers, K]: {kinds}")
        ids = torch.stack(list(picked.values()), dim=2)
        return Decisions(ids=ids, num_experts=next(iter(self.num_experts.values())), layers=tuple(picked))


def base_of(name: str) -> str:
    """The router of a layer's name, which ends in #2 where it decides for the second time in a forward."""
    return name.partition("#")[0]


@contextmanager
def record_routers(found: dict[str, Router], recording: Recording) -> Iterator[None]:
    """Keep the decisions that these routers take inside."""

    def tap(name: str, made: Decision, batch: int) -> None:
        if not replaying():  # a slot without room is where the two differ
            ids = torch.where(made.kept_TK == made.chosen_TK, made.kept_TK, -2 - made.chosen_TK)
            recording.keep(name, ids.view(batch, ids.shape[0] // max(batch, 1), ids.shape[1]))

    with _set(found, "tap", lambda name, _: partial(tap, name)):
        yield


def check_fits(decisions: Decisions, sizes: dict[str, tuple[int, int]]) -> None:
    """Raise InputError where decisions are not for a model's routers: (E, K) by name."""
    if set(map(base_of, decisions.layers)) != set(sizes):
        raise InputError(f"decisions for the layers {decisions.layers}, but the model's are {tuple(sizes)}")
    if wrong := {name: experts for name, (experts, _) in sizes.items() if experts != decisions.num_experts}:
        raise InputError(f"decisions among {decisions.num_experts} experts, but the model has {wrong}")
    K = decisions.ids.shape[3]
    if others := {name: columns for name, (_, columns) in sizes.items() if columns != K}:
        raise InputError(f"decisions of {K} experts per token, but the model takes {others}")


@contextmanager
def replay_routers(found: dict[str, Router], decisions: Decisions) -> Iterator[None]:
    """Every forward of these routers inside takes these decisions, which `check_fits`."""

    def source(name: str, router: Router) -> Callable[[int, int], tuple[Decision, bool]]:
        of_layer, c = decisions.layer(name), router.config
        bound = c.experts_pick or c.capacity_factor is not None  # there -1 is a decision: no room, not picked
        partly = not bound and bool((of_layer.chosen_TK < 0).all(-1).any())
        device = router.weight.device
        there = Decision(of_layer.chosen_TK.to(device), of_layer.kept_TK.to(device))

        def give(tokens: int, batch: int) -> tuple[Decision, bool]:
            has, had = [batch, tokens // max(batch, 1)], list(decisions.ids.shape[:2])
            if has != had:
                problem = f"decisions for [B, L] = {had}, but the layer got {has}"
                raise InputError(problem, layer=name, phase="route")
            return there, partly

        return give

    with _set(found, "source", source):
        yield


@contextmanager
def _set(found: dict[str, Router], attribute: str, made: Callable[[str, Router], object]) -> Iterator[None]:
    """Within, `attribute` of each router is what is `made` for it."""
    before = {name: getattr(router, attribute) for name, router in found.items()}
    try:
        for name, router in found.items():
            setattr(router, attribute, made(name, router))
        yield
    finally:
        for name, router in found.items():
            setattr(router, attribute, before[name])
