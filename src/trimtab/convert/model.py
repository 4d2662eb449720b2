"""What a checkpoint's config.json says: the model without weights, and what its state must be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from trimtab.checkpoint.folder import CONFIG, carried_files
from trimtab.convert.store import Mapped, TensorStore, kept
from trimtab.errors import ConfigError, InputError, first_line


def skeleton(folder: Path) -> Any:
    """The model of a folder's config.json on the meta device, of the class that the configuration names.

    Raises:
        InputError: no configuration there, none that transformers knows, or `architectures` that is no list.
        ConfigError: the weights are quantised.
    """
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder}: no {CONFIG}, which says what model the tensors are of; --config FOLDER names another"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the many configurations raise, this one cannot be used
        raise InputError(f"{folder / CONFIG}: {first_line(error)}") from error
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{folder / CONFIG}: the weights are quantised; convert plain ones (dequantise them first)")
    names = getattr(config, "architectures", None) or []
    if isinstance(names, str):
        raise InputError(f'{folder / CONFIG}: architectures is "{names}"; write it as a list: ["{names}"]')
    found = getattr(transformers, names[0], None) if names else None
    if names and found is None:
        raise InputError(f"{folder / CONFIG}: transformers {transformers.__version__} has no {names[0]}")
    with torch.device("meta"):
        try:
            return found._from_config(config) if found else transformers.AutoModelForCausalLM.from_config(config)
        except Exception as error:
            raise InputError(f"{folder / CONFIG}: cannot be built ({error})") from error


def carry(source: Path, target: Path, model: Any) -> list[str]:
    """Copy configuration and tokenizer files; returns their names. Plain transformers then opens `target`."""
    fields = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    fields["architectures"] = fields.get("architectures") or [type(model).__name__]
    (target / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    found = carried_files(source)
    for path in found:
        shutil.copyfile(path, target / path.name)
    return [CONFIG, *(path.name for path in found)]


def check_state(model: Any, store: TensorStore, where: Path) -> None:
    """Hold names and shapes against the model's. Raises InputError: what is missing, left over or of another shape."""
    wanted, found = model.state_dict(), store.infos
    name = type(model).__name__
    if more := [n for n in found if n not in wanted]:
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        sources = sorted(s for n in more for s in (store.sources_of(n) if isinstance(store, Mapped) else (n,)))
        hint = f"; transformers leaves {', '.join(ignored)} unread for this class" if ignored else ""
        raise InputError(
            f"{where}: {len(sources)} tensors have no place in {name}, among them {', '.join(sources[:3])}; what is to "
            f"be left behind must be named (--leave 'GLOB'){hint}"
        )
    if absent := [n for n in wanted if n not in found and n not in dict(ties(model))]:
        raise InputError(f"{where}: lacks {len(absent)} weights of {name}, among them {', '.join(absent[:3])}")
    for n, info in found.items():
        shape = tuple(wanted[n].shape)
        if info.shape != shape:
            turned = " (transposed?)" if sorted(info.shape) == sorted(shape) else ""
            raise InputError(f"{where}: {n} is {list(info.shape)}, by its configuration {list(shape)}{turned}")


def ties(model: Any) -> list[tuple[str, str]]:
    """(name, name of the weight that it shares): a checkpoint of transformers holds it once, our own under both."""
    return list((getattr(model, "all_tied_weights_keys", None) or {}).items())


def with_ties(model: Any, store: TensorStore) -> tuple[TensorStore, list[str]]:
    """The store with the shared weights that it lacks under both names, and the names that were added."""
    pairs = [(n, shared) for n, shared in ties(model) if n not in store.infos and shared in store.infos]
    copies = [kept(n, shared) for n, shared in pairs]
    return (Mapped(store, [*map(kept, store.infos), *copies]) if pairs else store), [n for n, _ in pairs]


def without(store: TensorStore, names: Iterable[str]) -> TensorStore:
    """The store without these."""
    dropped = set(names)
    return Mapped(store, [kept(n) for n in store.infos if n not in dropped]) if dropped else store


def shared_names(model: Any, store: TensorStore) -> list[str]:
    """Names under which the store repeats a shared weight. Raises InputError where the two are not the same bits."""
    repeated = []
    for n, shared in ties(model):
        if n in store.infos and shared in store.infos:
            one, other = store.read([n])[n], store.read([shared])[shared]
            if one.dtype != other.dtype or not torch.equal(_bits(one), _bits(other)):
                raise InputError(f"{n} and {shared} are one weight by the configuration, but they differ")
            repeated.append(n)
    return repeated


def without_prefix(model: Any, found: Iterable[str], wanted: Iterable[str]) -> str | None:
    """In words, that the names are those of a base model's folder; None where they are not."""
    prefix, expected = f"{model.base_model_prefix}.", set(wanted)
    bare = [n for n in found if n not in expected and prefix + n in expected]
    if not bare:
        return None
    name = type(model).__name__
    return (
        f"{bare[0]} lacks the prefix {prefix} that {name} has, as do {len(bare) - 1} more: a folder of the base model; "
        f"open it with transformers' {name}.from_pretrained and convert what save_pretrained writes of it"
    )


def first_difference(wanted: Mapping[str, object], found: Mapping[str, object]) -> str | None:
    """In words, the first name by which two mappings differ."""
    for n in sorted(wanted.keys() | found.keys()):
        if wanted.get(n) != found.get(n):
            return f"{n} is {wanted.get(n, 'not there')} and {found.get(n, 'not there')}"
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
