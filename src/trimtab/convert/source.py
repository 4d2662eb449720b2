"""The source of a conversion: the form and folder that a path means, its tensors, its model, its layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers

from trimtab.checkpoint import folder as on_disk
from trimtab.checkpoint.folder import CONFIG, carried_files
from trimtab.convert.files import DcpFolder, SafetensorsFolder, holds_safetensors
from trimtab.convert.layouts import LAYOUTS, Blocks, blocks_of, prove
from trimtab.convert.tensors import Mapped, TensorStore, bits, content_hash, kept
from trimtab.errors import ConfigError, InputError, first_line

TRANSFORMERS = "transformers"
FORMS = ("safetensors", "dcp")
ADAPTER = "adapter_config.json"
RECORD, RECORD_FORMAT, RECORD_VERSION = "convert.json", "trimtab.convert", 2


@dataclass(frozen=True, kw_only=True)
class Record:
    """convert.json in a folder that a conversion wrote: the next conversion sees tensors that were changed since.

    layout: "transformers", or the name of the layout of MoE blocks that are `trimtab.MoE`.
    source_hash: over the tensors that were converted, under their names in the source.
    hash, tensors: over this folder's tensors, and of each alone.
    """

    layout: str
    source_hash: str
    hash: str
    tensors: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write it into the folder."""
        content = {"format": RECORD_FORMAT, "version": RECORD_VERSION, **asdict(self)}
        (folder / RECORD).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def check(self, folder: Path, hashes: Mapping[str, str]) -> None:
        """Raise InputError where a tensor is not the one that the conversion wrote."""
        names = self.tensors.keys() | hashes.keys()
        if changed := sorted(name for name in names if self.tensors.get(name) != hashes.get(name)):
            raise InputError(
                f"{folder}: {len(changed)} tensors are not what was written there, among them {changed[0]}: its hash "
                f"is {content_hash(hashes)}, {RECORD} says {self.hash}. If that is meant, remove {RECORD}"
            )


def read_record(folder: Path) -> Record | None:
    """The record in a folder; None where no conversion wrote it. Raises InputError for one that cannot be read."""
    if not (folder / RECORD).is_file():
        return None
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        form, version = content.pop("format"), content.pop("version")
        if (form, version) == (RECORD_FORMAT, RECORD_VERSION):
            return Record(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / RECORD}: not the record of a conversion ({error!r})") from None
    raise InputError(
        f"{folder / RECORD}: {form} of version {version}, this trimtab reads {RECORD_FORMAT} of version "
        f"{RECORD_VERSION}; without the file, the folder is converted without comparing it with what was written"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """An opened source.

    form: one of FORMS. folder: of the tensors and of config.json. model: of that configuration, on the meta device.
    blocks: the checkpoint's MoE blocks. optimizer: key -> bytes, of optimizer state.
    record: of the conversion that wrote the folder, if one did.
    """

    form: str
    folder: Path
    store: TensorStore
    model: Any
    blocks: Blocks
    optimizer: Mapping[str, int] = field(default_factory=dict)
    record: Record | None = None


def open_source(src: Path, layout: str | None) -> Source:
    """Open `src`, in either form. Raises as `trimtab.convert.convert.convert` does."""
    form, folder = form_of(src)
    if (folder / ADAPTER).is_file():
        raise InputError(
            f"{folder}: {ADAPTER} lies beside the weights, and transformers opens them with that adapter: move it to a "
            "folder of its own; --merge FOLDER puts it into the weights"
        )
    model, record = skeleton(folder), read_record(folder)
    if form == "safetensors":
        own, blocks = SafetensorsFolder(folder), _blocks(model, layout or TRANSFORMERS)
        return Source(form=form, folder=folder, store=own, model=model, blocks=blocks, record=record)
    if record is not None and layout not in (None, record.layout):
        raise ConfigError(f"--layout {layout}: {folder} was written in the layout {record.layout}")
    blocks = _blocks(model, layout or (TRANSFORMERS if record is None else record.layout))
    dcp = DcpFolder(folder)
    ours = next((name for name in dcp.infos if name.endswith(("experts.gate_up", "experts.up"))), None)
    if ours is not None and blocks.layout is None:
        raise ConfigError(f"{folder}: {ours} is trimtab.MoE's; name the layout: --layout {'|'.join(LAYOUTS)}")
    return Source(
        form=form, folder=folder, store=dcp, model=model, blocks=blocks, optimizer=dcp.optimizer, record=record
    )


def form_of(src: Path) -> tuple[str, Path]:
    """(one of FORMS, the folder itself) for a path; of several checkpoints the latest.

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
    others = sorted(path.name for end in ("safetensors", "bin", "pt", "pth") for path in src.glob(f"*.{end}"))
    raise InputError(
        f"{src}: nothing to convert: no model.safetensors, no index of several, no step-00000000 folder"
        + (f", only {', '.join(others[:3])}; open it with transformers and save it as safetensors" if others else "")
    )


def skeleton(folder: Path) -> Any:
    """The model of a folder's config.json on the meta device, of the class that the configuration names.

    Raises:
        InputError: no configuration there, or none that transformers knows.
        ConfigError: the weights are quantized.
    """
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder}: no {CONFIG}, which says what model the tensors are of")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the many configurations raise, this one cannot be used
        raise InputError(f"{folder / CONFIG}: {first_line(error)}") from error
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{folder / CONFIG}: the weights are quantized; convert plain ones (dequantize them first)")
    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, names[0], None) if names else transformers.AutoModelForCausalLM
    if found is None:
        raise InputError(
            f"{folder / CONFIG}: transformers {transformers.__version__} has no {names[0]} (architectures={names})"
        )
    with torch.device("meta"):
        try:
            return found._from_config(config) if names else found.from_config(config)
        except Exception as error:
            raise InputError(f"{folder / CONFIG}: cannot be built ({error})") from error


def carry(source: Path, target: Path, model: Any) -> None:
    """Copy configuration and tokenizer files, so that plain transformers opens `target`."""
    fields = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    fields["architectures"] = fields.get("architectures") or [type(model).__name__]
    (target / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in carried_files(source):
        shutil.copyfile(path, target / path.name)


def check_state(model: Any, store: TensorStore, where: Path) -> None:
    """Compare names and shapes with the model's. Raises InputError for one missing, left over or of another shape."""
    wanted, found = model.state_dict(), store.infos
    name = type(model).__name__
    if more := [n for n in found if n not in wanted]:
        sources = sorted(s for n in more for s in (store.sources_of(n) if isinstance(store, Mapped) else (n,)))
        raise InputError(
            f"{where}: {len(sources)} tensors have no place in {name}, among them {', '.join(sources[:3])}; where "
            f"transformers ignores them, convert what {name}.from_pretrained and save_pretrained make of the folder"
        )
    if absent := [n for n in wanted if n not in found and n not in ties(model)]:
        raise InputError(f"{where}: lacks {len(absent)} weights of {name}, among them {', '.join(absent[:3])}")
    for n, info in found.items():
        shape = tuple(wanted[n].shape)
        if info.shape != shape:
            turned = " (transposed?)" if sorted(info.shape) == sorted(shape) else ""
            raise InputError(f"{where}: {n} is {list(info.shape)}, by its configuration {list(shape)}{turned}")


def ties(model: Any) -> dict[str, str]:
    """Name -> name of the weight that it shares: transformers' checkpoints hold it once, ours under both names."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def with_ties(model: Any, store: TensorStore) -> tuple[TensorStore, list[str]]:
    """The store with each shared weight under both names, and the names that were added."""
    added = {n: shared for n, shared in ties(model).items() if n not in store.infos and shared in store.infos}
    steps = [*map(kept, store.infos), *(kept(n, shared) for n, shared in added.items())]
    return (Mapped(store, steps) if added else store), list(added)


def without(store: TensorStore, names: Iterable[str]) -> TensorStore:
    """The store without the tensors of these names."""
    dropped = set(names)
    return Mapped(store, [kept(n) for n in store.infos if n not in dropped]) if dropped else store


def repeated_ties(model: Any, store: TensorStore) -> list[str]:
    """Names under which the store repeats a shared weight. Raises InputError where the two differ in a bit."""
    repeated = [n for n, shared in ties(model).items() if n in store.infos and shared in store.infos]
    for n in repeated:
        shared = ties(model)[n]
        one, other = (sha256(bits(store.read([name])[name]).numpy().data).digest() for name in (n, shared))
        if store.infos[n] != store.infos[shared] or one != other:
            raise InputError(f"{n} and {shared} are one weight by the configuration, but they differ")
    return repeated


def first_difference(wanted: Mapping[str, object], found: Mapping[str, object]) -> str | None:
    """The first name by which two mappings differ, in words."""
    for n in sorted(wanted.keys() | found.keys()):
        if wanted.get(n) != found.get(n):
            return f"{n} is {wanted.get(n, 'not there')} and {found.get(n, 'not there')}"
    return None


def _blocks(model: Any, name: str) -> Blocks:
    if name == TRANSFORMERS:
        return Blocks()
    if name not in LAYOUTS:
        raise ConfigError(f"--layout {name}: not one of {', '.join((TRANSFORMERS, *LAYOUTS))}")
    blocks = blocks_of(model, LAYOUTS[name])
    prove(LAYOUTS[name], next(iter(blocks.values())), model.config)
    return Blocks(LAYOUTS[name], tuple(blocks))
