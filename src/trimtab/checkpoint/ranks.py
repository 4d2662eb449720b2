"""State that belongs to one rank: random number generators, loads that `update_bias` has yet to see, and recipes,
which have seen the tokens of this rank. And actions of all ranks together: all go on, or all raise the same error.
"""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from trimtab.checkpoint.state import plain_name, unwrapped
from trimtab.errors import InputError, TrimtabError
from trimtab.experts.recipes.base import RecipeState
from trimtab.parallel.experts import ParallelExperts
from trimtab.routing.balance import routers

T = TypeVar("T")
State = dict[str, Any]


def rank_state(model: nn.Module, extra: Any = None) -> State:
    """This rank's random states (Python, NumPy if it is imported, torch, the accelerator, each router's own generator),
    each router's loads, each recipe's state with this rank's coordinates in its layer's mesh, and `extra`."""
    found = {plain_name(name): router for name, router in routers(unwrapped(model)).items()}
    return {
        "random": _get_random(),
        "generators": {n: r.generator.get_state() for n, r in found.items() if r.generator is not None},
        "loads": {n: (r._loads.cpu(), r._counts.cpu(), r._required.cpu()) for n, r in found.items()},
        "recipes": {name: (where, state.state_dict()) for name, (where, state) in _recipes(model).items()},
        "extra": extra,
    }


def check_readable(extra: Any) -> None:
    """Raise InputError where `load` could not read it again."""
    file = io.BytesIO()
    try:
        torch.save(extra, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what is raised depends on what is handed in
        kind = type(error).__name__
        raise InputError(
            f"rank_extra: cannot be read again ({kind}); hand in tensors, numbers, strings and containers of them"
        ) from error


def put_rank_state(model: nn.Module, state: State) -> None:
    """Restore what the same rank saved. Warns where a router has no generator for a saved state."""
    set_random(state["random"])
    for name, router in routers(unwrapped(model)).items():
        saved = state["generators"].get(plain_name(name))
        if saved is None:
            continue
        if router.generator is None:
            warnings.warn(
                f"router {plain_name(name)}: the checkpoint has the state of its own generator, which it lacks here. "
                "Attach router.generator before `load`, or it draws other numbers than were to come",
                stacklevel=3,
            )
        else:
            router.generator.set_state(saved)
    put_loads(model, [state], 0, 1)
    for name, (where, module) in _recipes(model).items():
        there, values = state["recipes"].get(name, (None, {}))
        if there == where:  # else it has what the checkpoint holds of its experts
            module.load_state_dict(values)


def put_loads(model: nn.Module, states: Sequence[State], rank: int, ranks: int) -> None:
    """Share out the loads that other ranks saved, so that their sum stays what it is: rank r takes those of ranks r,
    r + ranks, … The counts of the step are the same on all ranks of a batch."""
    for name, router in routers(unwrapped(model)).items():
        saved = [state["loads"][plain_name(name)] for state in states if plain_name(name) in state["loads"]]
        router.take_loads()  # of the step that was being counted
        for loads_E, _, *required_EH in saved[rank::ranks]:
            router._loads += loads_E.to(router._loads.device)
            for one in required_EH:  # none in checkpoints of before
                if one.shape == router._required.shape:  # the same rule
                    router._required += one.to(router._required.device)
        for _, counts_E, *_ in saved[:1]:
            router._counts.copy_(counts_E)


def _recipes(model: nn.Module) -> dict[str, tuple[list[int], RecipeState]]:
    """By name; with the shape of the mesh that shares the experts, if one does, and this rank's coordinates there."""
    found = {}
    for name, owner in unwrapped(model).named_modules():
        mesh = owner.place.mesh if isinstance(owner, ParallelExperts) else None
        where = [] if mesh is None else [*mesh.shape, *(mesh.get_coordinate() or ())]
        for own, state in owner.named_children():
            if isinstance(state, RecipeState):
                found[plain_name(f"{name}.{own}")] = where, state
    return found


def _get_random() -> State:
    state: State = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    if torch.accelerator.is_available():
        state["device"] = _device_module().get_rng_state()
    return state


def set_random(state: State) -> None:
    """Restore what `rank_state` has under "random"."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002
    if "device" in state and torch.accelerator.is_available():
        _device_module().set_rng_state(state["device"])


def _device_module() -> Any:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.get_device_module(device)


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `action` on the group's first rank; every rank must call, and returns its result or raises its error."""
    first = not dist.is_initialized() or dist.get_rank(group) == 0
    return cast(T, on_every_rank(lambda: action() if first else None, group)[0])


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Run `action` on every rank; each returns the results by rank, or raises the first error of any of them."""
    if not dist.is_initialized():
        return [action()]
    answer: tuple[T | None, TrimtabError | None]
    try:
        answer = action(), None
    except TrimtabError as error:
        answer = None, type(error)(str(error))
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        answer = None, InputError(f"{type(error).__name__}: {error}")
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, answer, group=group)
    for rank, (_, failed) in enumerate(answers):
        if failed is not None:
            raise failed if len(answers) == 1 else type(failed)(f"rank {rank}: {failed}")
    return [value for value, _ in answers]
