"""A checkpoint's tensors and files: those that are trained, those that are kept, and `final/`, written from both.

`final/` has the names, the dtypes and the files of the checkpoint that the run began with; what the language model does
not load (vision towers, MTP layers, value heads) is copied. FP8 and MXFP4 are first written out in bfloat16.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.folder import CONFIG, carried_files
from trimtab.checkpoint.state import unwrapped
from trimtab.convert.export import LiveModel, send_all
from trimtab.convert.files import SHARD_BYTES, SafetensorsFolder, holds_safetensors, write_safetensors
from trimtab.convert.merge import WithAdapters, read_adapter
from trimtab.convert.source import RECORD, check_state, ties, without
from trimtab.convert.steps import loading_steps, mapping_of, saving_steps, without_place
from trimtab.convert.tensors import Mapped, Step, TensorInfo, TensorStore, kept
from trimtab.errors import ConfigError, first_line
from trimtab.experts.quantized import FORMATS, decoded
from trimtab.train.presets import IDENTITY
from trimtab.train.report import WRITTEN

WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint held against the model that is trained.

    store: its tensors, but those to drop. mapping: those of transformers' transforms that loading goes through.
    carried: tensors that the model has no place for. files: that go with the weights.
    summary: what is not trained and kept, dropped, or becomes something else, in words.
    """

    folder: Path
    store: TensorStore
    mapping: list[Any]
    carried: list[str]
    files: list[Path]
    summary: str


def open_source(folder: Path, model: Any, drop: Sequence[str] = ()) -> Source:
    """Hold a checkpoint's headers against `model`, which may be on the meta device. Reads no values.

    Raises InputError where a file is missing or cut off, weights or experts are missing, or a tensor is of another
    shape; ConfigError where the weights are not in safetensors, or quantized in an unknown way.
    """
    if not holds_safetensors(folder):
        raise ConfigError(f"{folder}: no weights in safetensors; open it with transformers and save it again")
    how = quantization(folder)
    store: TensorStore = plain(SafetensorsFolder(folder), how)
    dropped = [name for name in store.infos if _matches(name, drop)]
    store = without(store, dropped)
    carried, mapping = without_place(model, store), mapping_of(model)
    own = without(store, carried)
    check_state(model, Mapped(own, loading_steps(model, mapping, own)), folder)
    files, left = files_beside(folder, drop)
    words = [f"weights in {how['quant_method'].upper()} become bfloat16"] if how else []
    for names, what in ((carried, "kept as they are"), (dropped, "dropped")):
        words += [f"{len(names)} tensors are {what}: {_kinds(names)}"] if names else []
    words += [f"not kept: {', '.join(left)}"] if left else []
    used = [transform for transform in mapping if transform.was_used()]
    return Source(folder, store, used, carried, files, "; ".join(words))


def write_model(model: Any, source: Source, folder: Path, *, dtype: str | None, write: bool) -> None:
    """Write what `source` was opened for, trained, to `folder`, in `dtype` or each weight in the checkpoint's. Every
    rank must call; one has `write`, and raises InputError of what it cannot write when the others have sent all."""
    inner = unwrapped(model)
    saved = _as_saved(LiveModel(inner, write=write), inner, source, dtype)
    if write:
        _write_all(saved, source, folder, dtype, read_on=True)
    else:
        send_all(saved)


def write_merged(adapter: Path, model: Any, source: Source, folder: Path, *, dtype: str | None) -> str:
    """Write what `source` was opened for, with an adapter of peft's merged into it, to `folder`: on one rank, of files
    alone. Returns how much was changed, in words. Raises InputError where a tensor of the adapter finds no place, or a
    weight becomes infinite."""
    folder.mkdir()
    own = without(source.store, source.carried)
    state = Mapped(own, loading_steps(model, mapping_of(model), own))
    merged = WithAdapters(state, read_adapter(adapter, model))
    _write_all(_as_saved(merged, model, source, dtype), source, folder, dtype)
    changed = [merged.changed[name] for name, part in merged.adapters.items() if part.experts is not None]
    experts = f", {sum(map(sum, changed)):,} of {sum(map(len, changed)):,} experts' matrices" if changed else ""
    return f"{len(merged.changed)} weights changed{experts}"


def _as_saved(state: TensorStore, model: Any, source: Source, dtype: str | None) -> Mapped:
    """A model's state by the checkpoint's names, in its dtypes or in the one that was asked for."""
    shared = [name for name in ties(model) if name in state.infos]
    saved = Mapped(state, saving_steps(model, source.mapping, state))
    twice = [name for name in saved.infos if name not in source.store.infos and {*saved.sources_of(name)} <= {*shared}]
    return Mapped(saved, [_cast(name, saved.infos[name], source, dtype) for name in saved.infos if name not in twice])


def _write_all(saved: TensorStore, source: Source, folder: Path, dtype: str | None, *, read_on: bool = False) -> None:
    _write(_Both(saved, Mapped(source.store, map(kept, source.carried))), folder, read_on=read_on)
    (folder / WRITTEN).touch()
    copy_files(source.files, source.folder, folder, dtype)
    (folder / WRITTEN).unlink()


def files_beside(folder: Path, drop: Sequence[str] = ()) -> tuple[list[Path], list[str]]:
    """The files that go with a checkpoint's weights, and what of the folder stays behind, in words. Links that lead out
    of the folder stay behind (what they lead to may be private), but for those of the Hub's cache and of files that a
    model consists of. Raises ConfigError for a file that cannot be read."""
    root = folder.resolve()
    inside = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    own = {folder / CONFIG, *carried_files(folder)}
    files, left = [], []
    for path in sorted(folder.iterdir()):
        if not _goes_along(path, drop):
            left += [] if _matches(path.name, (".*", "model*.safetensors*", RECORD, IDENTITY, *drop)) else [path.name]
            continue
        for each in sorted(p for p in path.rglob("*") if not p.is_dir()) if path.is_dir() else [path]:
            if each in own or any(each.resolve().is_relative_to(place) for place in inside):
                _check_readable(each, path.name)
                files.append(each)
            else:
                left.append(f"{each.relative_to(folder)} (a link that leads out of the folder)")
    return files, left


def _check_readable(path: Path, name: str) -> None:
    try:
        why = "no file, or a link to none"
        if path.is_file():
            return path.open("rb").close()
    except OSError as error:
        why = str(error.strerror)
    raise ConfigError(
        f"{path}: goes with the weights, and cannot be read ({why}); put it right, or leave it out by --drop {name}"
    )


def copy_files(files: Iterable[Path], source: Path, folder: Path, dtype: str | None) -> None:
    """Copy what goes with a checkpoint's weights; its configuration without what is no longer so."""
    for path in files:
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        if path.name != CONFIG:
            shutil.copyfile(path, target)
        else:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields.pop("quantization_config", None) is not None:
                dtype = dtype or "bfloat16"
            for part in (fields, *(value for value in fields.values() if isinstance(value, dict))):
                part.update({key: dtype for key in ("dtype", "torch_dtype") if dtype and key in part})
            target.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def quantization(folder: Path) -> dict[str, Any]:
    """A checkpoint's `quantization_config`; empty if there is none. Raises ConfigError for one that is not known."""
    try:
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {folder}: {CONFIG} cannot be read ({first_line(error)})") from None
    found: dict[str, Any] = fields.get("quantization_config") or {}
    if found and found.get("quant_method") not in ("fp8", "mxfp4"):
        raise ConfigError(f"--model {folder}: quantized by {found.get('quant_method')}; train the plain weights")
    return found


def plain(store: TensorStore, quantized: Mapping[str, Any]) -> TensorStore:
    """The tensors of a checkpoint with those of FP8 and MXFP4 as bfloat16, under the names of plain ones.

    Raises ConfigError if codes lack their scales, or are of another dtype.
    """
    if not quantized:
        return store
    scales = {name: own for name, info in store.infos.items() if (own := _scales(name, info))}
    if bare := [name for name, own in scales.items() if own not in store.infos]:
        raise ConfigError(f"codes without scales in {_kinds(bare)}, {bare[0]} for one: fetch all files again")
    if odd := [name for name in store.infos if f"{name}_scale_inv" in store.infos and name not in scales]:
        raise ConfigError(f"{odd[0]} has scales, but is {store.infos[odd[0]]} and not float8_e4m3fn")
    block, of_codes = quantized.get("weight_block_size"), set(scales.values())
    names = [name for name in store.infos if name not in of_codes]
    return Mapped(store, [_decode(name, scales[name], block) if name in scales else kept(name) for name in names])


def _scales(name: str, info: TensorInfo) -> str | None:
    """The name of the scales of a tensor of codes."""
    if name.endswith("_blocks"):
        return f"{name.removesuffix('_blocks')}_scales"
    return f"{name}_scale_inv" if info.dtype is torch.float8_e4m3fn else None


def _decode(name: str, scales: str, block: Sequence[int] | None) -> Step:
    """The step that makes bfloat16 weights of codes: of FP8 [..., out, in] with a scale for each block, or of MXFP4
    packed as GPT-OSS has it, [E, out, groups, 16], which become [E, in, out]."""
    target = name.removesuffix("_blocks")

    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        codes, scale = tensors[name], tensors[scales]
        if target != name:
            return {target: decoded(codes.flatten(-2), scale, "mxfp4", torch.bfloat16).transpose(-1, -2).contiguous()}
        *_, outs, ins = codes.shape
        rows, columns = block if block and scale.dim() > 1 else (outs, ins)
        form = replace(FORMATS["fp8"], outs=min(rows, outs), ins=min(columns, ins))
        scale = scale.float().reshape(-1, *(scale.shape[-2:] if scale.dim() > 1 else (1, 1)))
        return {name: decoded(codes.reshape(-1, outs, ins), scale, form, torch.bfloat16).reshape(codes.shape)}

    return Step((name, scales), run)


def write_plain(source: Path, folder: Path) -> None:
    """Write a quantized checkpoint out in bfloat16, with all that goes with it."""
    folder.mkdir(parents=True)
    _write(plain(SafetensorsFolder(source), quantization(source)), folder)
    copy_files(files_beside(source)[0], source, folder, None)


def _write(store: TensorStore, folder: Path, *, read_on: bool = False) -> None:
    from tqdm import tqdm

    title = f"writing {folder.name}"
    with tqdm(total=len(store.infos), desc=title, unit="tensor", delay=2, leave=False, disable=None) as bar:
        write_safetensors(store, folder, shard_bytes=SHARD_BYTES, done=lambda _: bar.update(), read_on=read_on)


def _cast(name: str, info: TensorInfo, source: Source, dtype: str | None) -> Step:
    """The step that gives a trained tensor the checkpoint's dtype, or the one that was asked for."""
    if not info.dtype.is_floating_point:
        return kept(name)
    held = source.store.infos
    common = Counter(known.dtype for known in held.values()).most_common(1)[0][0]
    wanted: torch.dtype = getattr(torch, dtype) if dtype else held[name].dtype if name in held else common
    return Step((name,), lambda tensors: {name: tensors[name].to(wanted)}, by_rows=True)


class _Both(TensorStore):
    """Two stores as one."""

    def __init__(self, *stores: TensorStore) -> None:
        self._of = {name: store for store in stores for name in store.infos}
        self.infos = {name: store.infos[name] for name, store in self._of.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._of[name].read([name])[name] for name in names}

    def read_rows(self, name: str, rows: slice) -> Tensor:
        return self._of[name].read_rows(name, rows)


def _goes_along(path: Path, drop: Sequence[str]) -> bool:
    if _matches(path.name, (".*", RECORD, IDENTITY, *drop)):
        return False
    if path.is_dir():
        return path.name == TEMPLATES
    return not path.name.endswith(WEIGHTS) or path.name.startswith("value_head.")


def size_written(source: Source, dtype: str | None) -> int:
    """Bytes of the folder that `write_model` or `write_merged` makes of a source."""
    size = sum(path.stat().st_size for path in source.files)
    for name, info in source.store.infos.items():
        trained = dtype and info.dtype.is_floating_point and name not in source.carried
        size += replace(info, dtype=getattr(torch, str(dtype)) if trained else info.dtype).nbytes
    return size


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _kinds(names: Iterable[str]) -> str:
    """The first two parts of the names of some tensors, each once."""
    heads = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))
    return ", ".join(heads[:4]) + (" …" if len(heads) > 4 else "")
