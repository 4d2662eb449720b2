"""Tensors of global shape, by key, into the files of torch.distributed.checkpoint and back."""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import trimtab
from trimtab.checkpoint import folder as on_disk
from trimtab.checkpoint.folder import Index
from trimtab.errors import InputError, full_disk
from trimtab.validation import check_sizes


class SavePlanner(DefaultSavePlanner):
    """Tensors under their own keys, none flattened."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


def write_dcp(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None, *, alone: bool = False,
    planner: SavePlanner | None = None,
) -> None:  # fmt: skip
    """Write what this rank holds of `tensors`. Every rank of the group must call; synced when it returns.

    alone: this process writes all of it, whether it is in a group or not.
    """
    no_dist = alone or not dist.is_initialized()
    with errors_of(folder):
        dcp_save(
            dict(tensors), planner=planner or SavePlanner(), process_group=group, no_dist=no_dist,
            storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=10_000_000 if planner is None else 0),
        )  # fmt: skip


def read_dcp(
    folder: Path, into: Mapping[str, Tensor], group: dist.ProcessGroup | None = None, *, alone: bool = False,
    planner: DefaultLoadPlanner | None = None,
) -> None:  # fmt: skip
    """Fill the tensors in place, each with what this rank holds of it. Keys, shapes and dtypes were checked before.

    Every rank of the group must call, each with its keys; `alone` as for `write_dcp`.
    """
    planner = planner or DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    no_dist = alone or not dist.is_initialized()
    with errors_of(folder, reading=True):
        dcp_load(
            dict(into), storage_reader=FileSystemReader(folder), planner=planner, process_group=group, no_dist=no_dist
        )


def stored(folder: Path | str) -> dict[str, Any]:
    """Shapes (`size`) and dtypes (`properties.dtype`) by key, of what a checkpoint holds.

    Raises InputError where torch's index of it cannot be read.
    """
    try:
        return dict(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except Exception as error:  # what a damaged pickle raises depends on where it is damaged
        raise unreadable(Path(folder) / ".metadata", error) from error


def read_tensors(folder: Path | str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors on the CPU, in one process and without a process group; all of them if no keys are given.

    Args:
        folder: a whole checkpoint.
        keys: such as "model.layers.0.moe.experts.gate_up"; see `trimtab.checkpoint.folder`.

    Raises:
        InputError: the folder is not a whole checkpoint, is damaged, or lacks a key.
    """
    folder = Path(folder)
    on_disk.read_index(folder)
    found = stored(folder)
    wanted = list(found if keys is None else keys)
    if absent := [key for key in wanted if key not in found]:
        raise InputError(f"{folder}: holds no {', '.join(absent)}")
    tensors = {key: torch.empty(found[key].size, dtype=found[key].properties.dtype, device="cpu") for key in wanted}
    read_dcp(folder, tensors, alone=True)
    return tensors


def write_tensors(
    root: Path | str, tensors: Mapping[str, Tensor], *, step: int, experts: dict[str, dict[str, list[int]]],
    extra: dict[str, Any] | None = None, files: Mapping[str, str | bytes] | None = None,
) -> Path:  # fmt: skip
    """A checkpoint of whole tensors, written by one process without a process group: ROOT/step-<step>.

    Args:
        root: the folder of the checkpoints.
        tensors: by key, "model.<name>".
        step: optimizer steps taken.
        experts, extra: as in `Index`.
        files: small files that go beside it, by name ("config.json").

    Raises:
        ConfigError: there is one of this step, `root` cannot be written, or `step` is no whole number.
        InputError: `extra` is no dict of JSON, or `files` has a name or contents that cannot be written.
    """
    files = {} if files is None else files
    check_given(step, extra, files)
    unfinished = on_disk.begin(Path(root), step)
    write_dcp(unfinished, tensors, alone=True)
    write_files(unfinished, files)
    index = make_index(step=step, world=0, experts=experts, extra=extra or {})
    on_disk.write_index(unfinished, index)
    return on_disk.finish(unfinished)


def check_given(step: int, extra: dict[str, Any] | None, files: Mapping[str, str | bytes]) -> None:
    """Check, before anything is written, the arguments that are written last.

    Raises:
        ConfigError: `step` is no whole number, or negative.
        InputError: `extra` is no dict of JSON; `files` has names that cannot lie beside a checkpoint's own, or contents
            that are neither str nor bytes.
    """
    check_sizes(0, step=step)
    if extra is not None and not isinstance(extra, dict):
        raise InputError(f"extra: {type(extra).__name__}; hand in a dict")
    try:
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"extra: {error}; hand in what JSON holds") from None
    for name, content in files.items():
        if not isinstance(name, str) or not on_disk.may_lie_beside(name):
            raise InputError(f"files: {name!r} must be the name of a file beside the checkpoint's own, without folders")
        if not isinstance(content, (str, bytes)):
            raise InputError(f"files: {name!r} is to hold {type(content).__name__}; hand in str or bytes")


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write what `check_given` has passed."""
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def make_index(*, step: int, **fields: Any) -> Index:
    """An `Index` of the versions that run here."""
    step = operator.index(step)  # NumPy's integers are no JSON
    return Index(step=step, trimtab=trimtab.__version__, torch=str(torch.__version__), **fields)


@contextmanager
def errors_of(folder: Path, *, reading: bool = False) -> Iterator[None]:
    """Around torch's reads and writes: its CheckpointException becomes one InputError on every rank, which names the
    rank and, of a folder being written, a full disk. An InputError of ours or a signal passes as it is."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # a BaseException
        for first, _ in error.failures.values():
            if not isinstance(first, Exception):  # a signal that asks the program to end is no failure of the save
                raise first from None
        rank, (first, _) = min(error.failures.items())
        if isinstance(first, InputError):
            raise first from None
        if reading:
            raise unreadable(folder, first, f"rank {rank}: ") from error
        raise InputError(f"{folder}: rank {rank}: {type(first).__name__}: {first}{full_disk(folder)}") from error


def unreadable(path: Path, error: BaseException, who: str = "") -> InputError:
    """The error for a file of a checkpoint that is there with all its bytes and cannot be read."""
    if isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError)):
        return InputError(f"{path}: {who}cannot be read ({type(error).__name__}: {error})")
    # Without torch's own advice, which is to load it with weights_only=False: to run what is in it.
    return InputError(
        f"{path}: {who}damaged, cannot be read ({type(error).__name__}); copy it again, or take another checkpoint"
    )
