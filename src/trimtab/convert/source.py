"""What a conversion starts from: the form and folder that a path means, its tensors, its model, its layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.checkpoint import folder as on_disk
from trimtab.convert.dcp import DcpFolder
from trimtab.convert.files import SafetensorsFolder, holds_safetensors
from trimtab.convert.layouts import ExpertLayout, experts_modules, layout_of
from trimtab.convert.layouts_moe import blocks_of, prove
from trimtab.convert.layouts_named import BLOCKS
from trimtab.convert.model import first_difference, skeleton
from trimtab.convert.record import Record, check_layouts, read_record
from trimtab.convert.store import TensorStore
from trimtab.convert.ways import Blocks
from trimtab.errors import ConfigError, InputError

TRANSFORMERS = "transformers"
FORMS = ("safetensors", "dcp")


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """An opened source.

    folder: of the tensors. described: of config.json. model: on the meta device.
    experts: by experts module, how transformers lays it out. blocks: the checkpoint's MoE blocks.
    left: names of tensors that are left behind on request, and not in the store.
    optimizer: key -> bytes, of optimiser state. record: of the conversion that wrote the folder, if one did.
    """

    folder: Path
    described: Path
    store: TensorStore
    left: list[str]
    model: Any
    experts: dict[str, ExpertLayout]
    blocks: Blocks
    optimizer: Mapping[str, int]
    record: Record | None


def open_source(src: Path, *, to: str, layout: str | None, leave: Sequence[str], config: Path | None) -> Source:
    """Open what is to be converted to the form `to`, but for what is to be left behind.

    Raises as `trimtab.convert.convert.convert` does.
    """
    form, folder = form_of(src)
    if form == to:
        other = next(name for name in FORMS if name != to)
        raise ConfigError(f"{src}: holds {form} already, --to {to} has nothing to do; --to {other} converts it")
    described = folder if config is None else config
    model, record = skeleton(described), read_record(folder)
    experts = {name: layout_of(module, name) for name, module in experts_modules(model).items()}
    check_layouts(record, folder, experts)
    said = record.layout if record is not None and form == "dcp" else None
    blocks = _blocks(model, layout, said, folder)
    store: SafetensorsFolder | DcpFolder
    store = DcpFolder(folder, leave=leave) if form == "dcp" else SafetensorsFolder(folder, leave=leave)
    optimizer: Mapping[str, int] = {}
    if isinstance(store, DcpFolder):
        optimizer = store.left_behind
        _check_dcp(store, blocks)
    return Source(
        folder=folder, described=described, store=store, left=store.left, model=model, experts=experts,
        blocks=blocks, optimizer=optimizer, record=record,
    )  # fmt: skip


def form_of(src: Path) -> tuple[str, Path]:
    """The form of what lies at a path, one of FORMS, and the folder itself: of several checkpoints the latest.

    Raises InputError where there is neither, both, or no whole one.
    """
    if not src.is_dir():
        raise InputError(f"{src}: {'a file, not a folder' if src.exists() else 'no such folder'}")
    steps = [*on_disk.whole_checkpoints(src), *on_disk.unfinished_checkpoints(src)]
    checkpoint = bool(steps) or (src / on_disk.INDEX).is_file() or src.name.endswith(on_disk.UNFINISHED)
    if checkpoint and holds_safetensors(src):
        other = steps[0].name if steps else on_disk.INDEX
        raise InputError(f"{src}: holds safetensors and a checkpoint ({other}); name one of them")
    if checkpoint:
        return "dcp", on_disk.resolve(src)
    if holds_safetensors(src):
        return "safetensors", src
    if others := sorted(path.name for path in src.glob("*.safetensors")):
        raise InputError(
            f"{src}: nothing to convert: {', '.join(others[:3])} by that name is no model's; expected "
            "model.safetensors, or several with an index"
        )
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in src.glob(pattern))
    if pickled:
        raise InputError(f"{src}: only {pickled[0]}; open it with transformers and save it as safetensors")
    raise InputError(f"{src}: nothing to convert: no model.safetensors, no index of several, no step-00000000 folder")


def shapes_of_experts(view: TensorStore, modules: Mapping[str, object]) -> dict[str, dict[str, list[int]]]:
    """Shapes of the experts' parameters by module, for the index of a checkpoint."""
    found: dict[str, dict[str, list[int]]] = {name: {} for name in modules}
    for name, info in view.infos.items():
        module, _, own = name.rpartition(".")
        if module in found:
            found[module][own] = list(info.shape)
    return found


def _blocks(model: Any, layout: str | None, said: str | None, folder: Path) -> Blocks:
    if layout is not None and said not in (None, layout):
        raise ConfigError(f"--layout {layout}: {folder} was written in the layout {said}")
    name = layout or said or TRANSFORMERS
    if name == TRANSFORMERS:
        return Blocks(None, ())
    if name not in BLOCKS:
        raise ConfigError(f"--layout {name}: not one of {', '.join((TRANSFORMERS, *BLOCKS))}")
    blocks = blocks_of(model, BLOCKS[name])
    prove(BLOCKS[name], next(iter(blocks.values())), model.config)
    return Blocks(BLOCKS[name], tuple(blocks))


def _check_dcp(store: DcpFolder, blocks: Blocks) -> None:
    assert store.index is not None
    found, modules = store.infos, store.index.experts
    said = {f"{name}.{own}": tuple(shape) for name, shapes in modules.items() for own, shape in shapes.items()}
    left = set(store.left)
    said = {name: shape for name, shape in said.items() if name not in left}
    if wrong := first_difference(said, {name: found[name].shape for name in said if name in found}):
        raise InputError(f"{store.folder}: {on_disk.INDEX} and the tensors disagree: {wrong}")
    ours = next((name for name in found if name.endswith("experts.up")), None)
    if ours is not None and blocks.layout is None:
        raise ConfigError(f"{store.folder}: {ours} is trimtab.MoE's; name the layout: --layout {'|'.join(BLOCKS)}")
