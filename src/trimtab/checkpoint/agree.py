"""Ranks that act as one: all go on, or all raise the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trimtab.errors import InputError, TrimtabError

T = TypeVar("T")


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `action` returns on the group's first rank; every rank must call, and raises what it raised there."""
    if not dist.is_initialized():
        return action()
    answer: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        answer[0], answer[1] = _caught(action)
    dist.broadcast_object_list(answer, group=group, group_src=0)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """What `action` returns on each rank, by rank; raises the first rank's error on all of them."""
    if not dist.is_initialized():
        return [action()]
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, _caught(action), group=group)
    for rank, (_, error) in enumerate(answers):
        if error is not None:
            raise error if len(answers) == 1 else type(error)(f"rank {rank}: {error}")
    return [value for value, _ in answers]


def _caught(action: Callable[[], T]) -> tuple[T | None, TrimtabError | None]:
    try:
        return action(), None
    except TrimtabError as error:
        return None, type(error)(str(error))
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        return None, InputError(f"{type(error).__name__}: {error}")
