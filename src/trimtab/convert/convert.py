"""Checkpoints of `trimtab.checkpoint` to folders of transformers (safetensors) and back, every tensor accounted for.

    safetensors --transformers' mapping--> the model's state --block layout--> DCP, and the same reversed

Names, shapes and dtypes are proved to come back from headers, before anything is written. The written folder is then
read back from disk through the inverse, and every tensor's hash must be the source's. Only then does the folder get
its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trimtab.checkpoint import folder as on_disk
from trimtab.checkpoint.tensors import make_index
from trimtab.convert import source as opened
from trimtab.convert.files import SHARD_BYTES, DcpFolder, SafetensorsFolder, write_safetensors, write_store
from trimtab.convert.layouts import experts_modules
from trimtab.convert.source import FORMS, TRANSFORMERS, Record, Source, first_difference
from trimtab.convert.steps import loading_steps, mapping_of, saved_mapping_of, saving_steps
from trimtab.convert.tensors import Hashed, Mapped, TensorStore, content_hash
from trimtab.errors import ConfigError, InputError

OnTensor = Callable[[int, int], None]
"""Called with (tensors done, of how many)."""
Back = Callable[[TensorStore], TensorStore]
"""Makes the source's tensors of the written ones."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of a conversion.

    folder: the written checkpoint or folder of transformers. files: names in it. record: layout and hashes, as written.
    experts: by experts module, the shapes of its parameters in the checkpoint.
    tensors, nbytes: of the source, that were converted.
    recorded: whether the source bore the record of a conversion, which its tensors were held against.
    optimizer: entries and bytes of optimizer state, which has no place in safetensors and is always left behind.
    """

    folder: Path
    files: list[str]
    record: Record
    experts: dict[str, dict[str, list[int]]]
    tensors: int
    nbytes: int
    recorded: bool
    optimizer: tuple[int, int]


def convert(
    src: Path | str, dst: Path | str, *, to: str, layout: str | None = None, shard_bytes: int = SHARD_BYTES,
    on_tensor: OnTensor = lambda done, total: None,
) -> Converted:  # fmt: skip
    """Convert in one process, without a process group or a device.

    Memory: the largest tensor of the checkpoint, a layer's gate and up, and blocks of a few times 4 MB.

    Args:
        src: a checkpoint of `trimtab.checkpoint`, or the root of several (the latest is meant), for "safetensors"; a
            folder as `save_pretrained` writes it for "dcp".
        dst: not there yet or empty. "dcp" writes DST/step-00000000, without optimizer state.
        to: "safetensors" or "dcp".
        layout: of the checkpoint's MoE blocks: "transformers", or the name of a `BlockLayout` where the model has
            `trimtab.MoE` in their place; by default the layout of the checkpoint's record, else "transformers". Under
            a `BlockLayout` a router's weight and bias of 16 bits become float32, and stay so on the way back.
        shard_bytes: of a file of safetensors, at most, where tensors are not larger.

    Raises:
        ConfigError: `dst` is not empty, the source is in the form asked for, names are unknown, the layout is not the
            model's, or weights are of a format of their own.
        InputError: the source is not whole; tensors are missing, left over, of another shape than their model's, of
            another dtype than those they are stacked with, or not those that its record says; or the written folder
            does not give the source back.
    """
    if to not in FORMS:
        raise ConfigError(f"--to {to}: not one of {', '.join(FORMS)}")
    source = opened.open_source(Path(src), layout)
    if source.form == to:
        (other,) = {*FORMS} - {to}
        raise ConfigError(f"{src}: holds {to} already, --to {to} has nothing to do; --to {other} converts it")
    return write_converted(source, Path(dst), to, shard_bytes, on_tensor)


def write_converted(source: Source, dst: Path, to: str, shard_bytes: int, on_tensor: OnTensor) -> Converted:
    """Write an opened source to `dst`, prove it, and name it."""
    dst = dst.resolve()  # a link's folder gets its name, not the link
    _check_new(dst, to)
    read = Hashed(source.store)
    view, back = _to_dcp(source, read) if to == "dcp" else _to_safetensors(source, read)
    planned = back(view).infos
    if wrong := first_difference(read.infos, planned):
        raise InputError(
            f"{source.folder}: would not come back as it is: {wrong} on the way there and back. If it is of a base "
            f"model, convert what {type(source.model).__name__}.from_pretrained and save_pretrained make of it"
        )
    total, done = len(view.infos) + len(planned), 0

    def step(_: str) -> None:
        nonlocal done
        done += 1
        on_tensor(done, total)

    experts: dict[str, dict[str, list[int]]] = {name: {} for name in experts_modules(source.model)}
    for name, info in (view if to == "dcp" else read).infos.items():
        module, _, own = name.rpartition(".")
        if module in experts:
            experts[module][own] = list(info.shape)
    with _unfinished(dst, to) as work:
        if to == "dcp":
            write_store(view, work, done=step)
        else:
            write_safetensors(view, work, shard_bytes=shard_bytes, done=step)
        read.finish()
        if source.record is not None:
            source.record.check(source.folder, read.hashes)
        written = Hashed(DcpFolder(work, whole=False) if to == "dcp" else SafetensorsFolder(work))
        again = Hashed(back(written))
        again.finish(step)
        if wrong := first_difference(read.hashes, again.hashes):
            raise InputError(f"{source.folder}: what was written does not come back as it was: hash of {wrong}")
        record = Record(
            layout=source.blocks.layout.name if source.blocks.layout else TRANSFORMERS,
            source_hash=content_hash(read.hashes), hash=content_hash(written.finish()), tensors=written.hashes,
        )  # fmt: skip
        opened.carry(source.folder, work, source.model)
        record.write(work)
        if to == "dcp":
            on_disk.write_index(work, make_index(step=0, world=0, experts=experts))
            folder = on_disk.finish(work)
        else:
            folder = work.rename(dst)
    return Converted(
        folder=folder, files=sorted(path.name for path in folder.iterdir()), record=record, experts=experts,
        tensors=len(read.infos), nbytes=sum(info.nbytes for info in read.infos.values()),
        recorded=source.record is not None, optimizer=(len(source.optimizer), sum(source.optimizer.values())),
    )  # fmt: skip


def _to_dcp(source: Source, store: TensorStore) -> tuple[TensorStore, Back]:
    model, blocks, mapping = source.model, source.blocks, mapping_of(source.model)
    loaded = Mapped(store, loading_steps(model, mapping, store))
    opened.check_state(model, loaded, source.folder)
    opened.repeated_ties(model, loaded)  # two that are one weight and differ would not come back
    used = [transform for transform in mapping if transform.was_used()]
    state, added = opened.with_ties(model, loaded)

    def back(written: TensorStore) -> TensorStore:
        theirs = opened.without(blocks.mapped(written, state, to_ours=False), added)
        return Mapped(theirs, saving_steps(model, used, theirs))

    return blocks.mapped(state, to_ours=True), back


def _to_safetensors(source: Source, store: TensorStore) -> tuple[TensorStore, Back]:
    model, blocks = source.model, source.blocks
    state = blocks.mapped(store, to_ours=False)
    opened.check_state(model, state, source.folder)
    repeated = opened.repeated_ties(model, state)
    once = opened.without(state, repeated)

    def back(written: TensorStore) -> TensorStore:
        loaded = Mapped(written, loading_steps(model, mapping_of(model), written))
        theirs, added = opened.with_ties(model, loaded)
        theirs = opened.without(theirs, (name for name in added if name not in repeated))
        return blocks.mapped(theirs, store, to_ours=True)

    return Mapped(once, saving_steps(model, saved_mapping_of(model), once)), back


def _check_new(dst: Path, to: str) -> None:
    """Raises ConfigError where `dst` cannot become the folder that is written."""
    if dst.exists() and not dst.is_dir():
        raise ConfigError(f"{dst}: a file; name a folder that is not there yet")
    if dst.exists() and (held := sorted(path.name for path in dst.iterdir())):
        raise ConfigError(f"{dst}: not empty, holds {held[0]}; name a folder that is not there yet")
    if to != "dcp" and (dst == Path.cwd() or dst.is_mount()):  # the written folder takes its place
        raise ConfigError(f"{dst}: the current folder or a file system's root; name a folder that is not there yet")


@contextmanager
def _unfinished(dst: Path, to: str) -> Iterator[Path]:
    """A folder to write into, gone if that fails."""
    created = not dst.exists()
    if to == "dcp":
        work = on_disk.begin(dst, 0)
    else:
        work = dst.with_name(dst.name + on_disk.UNFINISHED)
        try:
            work.mkdir(parents=True)
        except OSError as error:
            hint = "; is it left of an earlier run?" if isinstance(error, FileExistsError) else ""
            raise ConfigError(f"{work}: cannot be made ({error.strerror}){hint}") from error
    try:
        yield work
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        if created and dst.is_dir() and not any(dst.iterdir()):
            dst.rmdir()
        raise
