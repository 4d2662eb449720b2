"""Checkpoints of `trimtab.checkpoint` to folders of transformers (safetensors) and back, every tensor accounted for.

    safetensors --transformers' mapping--> the model's state --block layout--> DCP, and the same reversed

Names, shapes and dtypes are proved to come back from headers, before anything is written. What was written is then
read back from disk through the inverse, and every tensor's hash must be the source's. Only then does the folder get
its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trimtab.checkpoint import folder as on_disk
from trimtab.checkpoint.tensors import make_index
from trimtab.convert import source as opened
from trimtab.convert.dcp_files import DcpFolder, write_dcp
from trimtab.convert.layouts import experts_modules
from trimtab.convert.safetensors_files import SHARD_BYTES, SafetensorsFolder, write_safetensors
from trimtab.convert.source import FORMS, TRANSFORMERS, Record, Source, first_difference
from trimtab.convert.steps import loading_steps, mapping_of, saved_mapping_of, saving_steps
from trimtab.convert.tensors import Hashed, Mapped, TensorStore, content_hash
from trimtab.errors import ConfigError, InputError


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion did.

    folder: that was written, a checkpoint or a folder of transformers. files: in it.
    layout: of the checkpoint's MoE blocks. experts: by experts module, the shapes of its parameters in the checkpoint.
    tensors, nbytes: of the source, that were converted. source_hash, hash: of the source and of what was written.
    recorded: whether the source bore the record of a conversion, which its tensors were held against.
    optimizer: entries and bytes of optimizer state, which has no place in safetensors and is always left behind.
    """

    folder: Path
    files: list[str]
    layout: str
    experts: dict[str, dict[str, list[int]]]
    tensors: int
    nbytes: int
    source_hash: str
    hash: str
    recorded: bool
    optimizer: tuple[int, int]


def convert(
    src: Path | str,
    dst: Path | str,
    *,
    to: str,
    layout: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Convert in one process, without a process group or a device.

    Memory: three times gate and up of a layer's experts, and one file of safetensors where that is written.

    Args:
        src: a checkpoint of `trimtab.checkpoint`, or the root of several (the latest is meant), for "safetensors"; a
            folder as `save_pretrained` writes it for "dcp".
        dst: not there yet or empty. "dcp" writes DST/step-00000000, without optimizer state.
        to: "safetensors" or "dcp".
        layout: of the checkpoint's MoE blocks: "transformers", or the name of a `BlockLayout` where the model has
            `trimtab.MoE` in their place. If not given, what the checkpoint's record says, else "transformers". Under
            another a router's weight and bias of 16 bits become float32, and are not narrowed on the way back.
        shard_bytes: of a file of safetensors, at most, where tensors are not larger.
        on_tensor: told (tensors done, of how many).

    Raises:
        ConfigError: `dst` is not empty, the source is in the form asked for, names are unknown, the layout is not the
            model's, or weights are quantized.
        InputError: the source is not whole; tensors are missing, left over, of another shape than their model's, of
            another dtype than those they are stacked with, or not those that its record says; or what was written does
            not come back.
    """
    src, dst = Path(src), Path(dst).resolve()  # a link's folder gets its name, not the link
    if to not in FORMS:
        raise ConfigError(f"--to {to}: not one of {', '.join(FORMS)}")
    source = opened.open_source(src, to=to, layout=layout)
    new_folder(dst, to)
    read = Hashed(source.store)
    way = _to_dcp(source, read) if to == "dcp" else _to_safetensors(source, read)
    planned = way.back(way.view).infos
    if wrong := first_difference(read.infos, planned):
        raise InputError(
            f"{source.folder}: would not come back as it is: {wrong} on the way there and back. If it is of a base "
            f"model, convert what {type(source.model).__name__}.from_pretrained and save_pretrained make of it"
        )

    total, done = len(way.view.infos) + len(planned), 0

    def step(_: str) -> None:
        nonlocal done
        done += 1
        on_tensor(done, total)

    experts = _expert_shapes(way.view if to == "dcp" else read, experts_modules(source.model))
    with unfinished(dst, to) as work:
        if to == "dcp":
            write_dcp(way.view, work, done=step)
        else:
            write_safetensors(way.view, work, shard_bytes=shard_bytes, done=step)
        read.finish()
        if source.record is not None:
            source.record.check(source.folder, read.hashes)
        written = Hashed(DcpFolder(work, whole=False) if to == "dcp" else SafetensorsFolder(work))
        back = Hashed(way.back(written))
        for name in back.infos:
            back.read([name])
            step(name)
        if wrong := first_difference(read.hashes, back.hashes):
            raise InputError(f"{source.folder}: what was written does not come back as it was: hash of {wrong}")
        record = Record(
            layout=source.blocks.layout.name if source.blocks.layout else TRANSFORMERS,
            source_hash=content_hash(read.hashes),
            hash=content_hash(written.finish()),
            tensors=written.hashes,
        )
        opened.carry(source.folder, work, source.model)
        record.write(work)
        if to == "dcp":
            on_disk.write_index(work, make_index(step=0, world=0, experts=experts))
            folder = on_disk.finish(work)
        else:
            folder = work.rename(dst)
    return Converted(
        folder=folder,
        files=sorted(path.name for path in folder.iterdir()),
        layout=record.layout,
        experts=experts,
        tensors=len(read.infos),
        nbytes=sum(info.nbytes for info in read.infos.values()),
        source_hash=record.source_hash,
        hash=record.hash,
        recorded=source.record is not None,
        optimizer=(len(source.optimizer), sum(source.optimizer.values())),
    )


@dataclass(frozen=True, eq=False)
class _Way:
    """One direction. view: what is to be written. back: of what was written, the source's tensors."""

    view: TensorStore
    back: Callable[[TensorStore], TensorStore]


def _to_dcp(source: Source, store: TensorStore) -> _Way:
    model, blocks, mapping = source.model, source.blocks, mapping_of(source.model)
    loaded = Mapped(store, loading_steps(model, mapping, store))
    opened.check_state(model, loaded, source.folder)
    opened.repeated_ties(model, loaded)  # two that are one weight and differ would not come back
    used = [transform for transform in mapping if transform.was_used()]
    state, added = opened.with_ties(model, loaded)

    def back(written: TensorStore) -> TensorStore:
        theirs = opened.without(blocks.to_theirs(written, state), added)
        return Mapped(theirs, saving_steps(model, used, theirs))

    return _Way(blocks.to_ours(state), back)


def _to_safetensors(source: Source, store: TensorStore) -> _Way:
    model, blocks = source.model, source.blocks
    state = blocks.to_theirs(store)
    opened.check_state(model, state, source.folder)
    repeated = opened.repeated_ties(model, state)
    once = opened.without(state, repeated)

    def back(written: TensorStore) -> TensorStore:
        loaded = Mapped(written, loading_steps(model, mapping_of(model), written))
        theirs, added = opened.with_ties(model, loaded)
        theirs = opened.without(theirs, (name for name in added if name not in repeated))
        return blocks.to_ours(theirs, store)

    return _Way(Mapped(once, saving_steps(model, saved_mapping_of(model), once)), back)


def _expert_shapes(view: TensorStore, modules: Iterable[str]) -> dict[str, dict[str, list[int]]]:
    """Shapes of the experts' parameters by module."""
    found: dict[str, dict[str, list[int]]] = {name: {} for name in modules}
    for name, info in view.infos.items():
        module, _, own = name.rpartition(".")
        if module in found:
            found[module][own] = list(info.shape)
    return found


def new_folder(dst: Path, to: str = "safetensors") -> None:
    """Raises ConfigError where `dst` cannot become the folder that is written."""
    if dst.exists() and not dst.is_dir():
        raise ConfigError(f"{dst}: a file; name a folder that is not there yet")
    if dst.exists() and (held := sorted(path.name for path in dst.iterdir())):
        raise ConfigError(f"{dst}: not empty, holds {held[0]}; name a folder that is not there yet")
    if to != "dcp" and (dst == Path.cwd() or dst.is_mount()):  # what is written takes the folder's place
        raise ConfigError(f"{dst}: the current folder or a file system's root; name a folder that is not there yet")


@contextmanager
def unfinished(dst: Path, to: str) -> Iterator[Path]:
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
