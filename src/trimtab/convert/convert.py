"""Checkpoints of `trimtab.checkpoint` to folders of transformers (safetensors) and back, every tensor accounted for.

    safetensors --transformers' mapping--> the model's state --block layout--> DCP, and the same reversed

What will be written, and that it comes back under the same names, shapes and dtypes, is known from headers before
anything is written. What was written is then read back from disk through the inverse, and every tensor's hash must be
the source's. Only then does the folder get its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trimtab.checkpoint import folder as on_disk
from trimtab.checkpoint.tensors import make_index
from trimtab.convert.dcp import DcpFolder, write_dcp
from trimtab.convert.files import SHARD_BYTES, SafetensorsFolder, write_safetensors
from trimtab.convert.layouts import ExpertLayout
from trimtab.convert.model import carry, first_difference, without_prefix
from trimtab.convert.record import Record, check_content, write_record
from trimtab.convert.source import FORMS, TRANSFORMERS, Source, open_source, shapes_of_experts
from trimtab.convert.store import Digested, content_hash, is_left
from trimtab.convert.ways import ToDcp, ToSafetensors, Way
from trimtab.errors import ConfigError, InputError


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion did.

    folder: that was written, a checkpoint or a folder of transformers. files: in it.
    layout: of the checkpoint's MoE blocks. experts: by experts module of transformers' model, its layout there.
    tensors, nbytes: of the source, that were converted. source_hash, hash: of the source and of what was written.
    recorded: whether the source bore the record of a conversion, which its tensors were held against.
    left: tensors of the model that were left behind on request. optimizer: entries and bytes of optimiser state, which
    has no place in safetensors and is always left behind.
    """

    folder: Path
    files: list[str]
    layout: str
    experts: dict[str, ExpertLayout]
    tensors: int
    nbytes: int
    source_hash: str
    hash: str
    recorded: bool
    left: list[str]
    optimizer: tuple[int, int]


def convert(
    src: Path | str,
    dst: Path | str,
    *,
    to: str,
    layout: str | None = None,
    leave: Sequence[str] = (),
    config: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Convert in one process, without a process group or a device.

    Memory in use: three times the largest group of tensors that transformers' mapping takes together (gate and up of a
    layer's experts), and one file of safetensors where that is written. glibc may keep as much as the model of what
    was freed; with MALLOC_MMAP_THRESHOLD_=65536 in the environment it gives it back. Disk: each tensor is read twice.

    Args:
        src: a checkpoint of `trimtab.checkpoint`, or the root of several (the latest is meant), for "safetensors"; a
            folder as `save_pretrained` writes it for "dcp".
        dst: not there yet or empty. "dcp" writes DST/step-00000000, without optimiser state.
        to: "safetensors" or "dcp".
        layout: of the checkpoint's MoE blocks: "transformers", or the name of a `BlockLayout` where the model has
            `trimtab.MoE` in their place. If not given, what the checkpoint's record says, else "transformers". Under
            another a router's weight and bias of 16 bits become float32, and are not narrowed on the way back.
        leave: globs of tensor names in the source to leave behind. Nothing else is looked at of these tensors.
        config: a folder with the config.json to go by, if not the source's.
        shard_bytes: of a file of safetensors, at most, where tensors are not larger.
        on_tensor: told (tensors done, of how many).

    Raises:
        ConfigError: `dst` is not empty, the source is in the form asked for, names are unknown, the layout is not the
            model's, or weights are quantised.
        InputError: the source is not whole; tensors are missing, left over, of another shape than their model's, of
            another dtype than those they are stacked with (one that is not the model's is kept as it is), or not those
            that its record says; or what was written does not come back.
    """
    src, dst = Path(src), Path(dst).resolve()  # a link's folder gets its name, not the link
    if to not in FORMS:
        raise ConfigError(f"--to {to}: not one of {', '.join(FORMS)}")
    source = open_source(src, to=to, layout=layout, leave=leave, config=None if config is None else Path(config))
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise ConfigError(f"{dst}: not empty{_left_of_a_conversion(dst)}; name a folder that is not there yet")
    if to != "dcp" and (dst == Path.cwd() or dst.is_mount()):  # what is written takes the folder's place
        raise ConfigError(f"{dst}: the current folder or a file system's root; name a folder that is not there yet")
    idle = [glob for glob in leave if not any(is_left(name, [glob]) for name in source.left)]
    if idle:
        raise ConfigError(f"--leave {idle[0]}: {source.folder} has no tensor of that name")
    digested = Digested(source.store)
    way: Way
    if to == "dcp":
        way = ToDcp(source.model, source.blocks, digested, source.folder)
    else:
        way = ToSafetensors(source.model, source.blocks, digested, source.folder)
    planned = way.back(way.view).infos
    if wrong := first_difference(digested.infos, planned):
        bare = without_prefix(source.model, digested.infos, planned)
        raise InputError(
            f"{source.folder}: {bare or f'would not come back as it is: {wrong} on the way there and back'}"
        )

    total, done = len(way.view.infos) + len(planned), 0

    def step(_: str) -> None:
        nonlocal done
        done += 1
        on_tensor(done, total)

    with _unfinished(dst, to) as work:
        if to == "dcp":
            write_dcp(way.view, work, done=step)
        else:
            write_safetensors(way.view, work, shard_bytes=shard_bytes, done=step)
        check_content(source.record, source.folder, digested.finish(), source.left)
        written = Digested(DcpFolder(work, whole=False) if to == "dcp" else SafetensorsFolder(work))
        _prove(way, digested, written, source, step)
        record = Record(
            layout=source.blocks.layout.name if source.blocks.layout else TRANSFORMERS,
            experts={name: kind.as_json() for name, kind in source.experts.items()},
            source_hash=content_hash(digested.digests),
            hash=content_hash(written.finish()),
            tensors=written.digests,
            left=source.left,
        )
        carry(source.described, work, source.model)
        write_record(work, record)
        if to == "dcp":
            experts = shapes_of_experts(way.view, source.experts)
            on_disk.write_index(work, make_index(step=0, world=0, experts=experts))
            folder = on_disk.finish(work)
        else:
            folder = work.rename(dst)
    return Converted(
        folder=folder,
        files=sorted(path.name for path in folder.iterdir()),
        layout=record.layout,
        experts=source.experts,
        tensors=len(digested.infos),
        nbytes=sum(info.nbytes for info in digested.infos.values()),
        source_hash=record.source_hash,
        hash=record.hash,
        recorded=source.record is not None,
        left=source.left,
        optimizer=(len(source.optimizer), sum(source.optimizer.values())),
    )


def _left_of_a_conversion(dst: Path) -> str:
    left = [path for path in on_disk.unfinished_checkpoints(dst) if path.name.endswith(on_disk.UNFINISHED)]
    return f": {left[0].name} is left of a conversion that did not end and can be removed" if left else ""


def _prove(way: Way, source: Digested, written: Digested, opened: Source, step: Callable[[str], None]) -> None:
    """Read back through the inverse. Raises InputError at the first tensor that is not the source's."""
    back = Digested(way.back(written))
    for name in back.infos:
        back.read([name])
        step(name)
    if wrong := first_difference(source.digests, back.digests):
        raise InputError(f"{opened.folder}: what was written does not come back as it was: hash of {wrong}")


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
