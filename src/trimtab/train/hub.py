"""Names of the hub, `--model Qwen/Qwen3-30B-A3B` and `--data org/set:test=0.3`: folders of its cache on this disk.

Nothing is fetched. What the cache lacks, as a whole or in part, is answered with the command that fetches it.
Importing this imports no torch.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError
from trimtab.extras import required

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?P<revision>@[\w./-]+)?(?P<rest>(:[\w.-]+)?(=[0-9.e+-]+)?)")
"""`org/name`, `org/name@revision`, and what `--data` has behind a path."""
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\b")


def on_this_disk(given: dict[str, Any]) -> dict[str, Any]:
    """Options by name, with folders where `model`, `data` and `eval_data` name repositories of the hub. Raises
    ConfigError for one that is not in the cache, or not whole."""
    made = dict(given)
    if "model" in given:
        made["model"] = _folder(given["model"], "--model")
    for name in ("data", "eval_data"):
        if name in given:
            made[name] = tuple(_folder(each, f"--{name.replace('_', '-')}") for each in given[name])
    return made


def _folder(name: str, flag: str) -> str:
    found = _NAME.fullmatch(name)
    if found is None or Path(name).exists() or Path(found["repo"]).parent.exists():
        return name  # a path, if a wrong one
    repo, revision, model = found["repo"], (found["revision"] or "@")[1:], flag == "--model"
    required("transformers", "trimtab train", "train")  # which has huggingface_hub with it
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    kind = "model" if model else "dataset"
    try:
        folder = Path(snapshot_download(repo, repo_type=kind, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):  # the latter for what no repository may be called
        what = "is no path here, nor in the hub's cache"
    else:
        if _is_whole(folder, "*.safetensors" if model else "*"):
            return f"{folder}{found['rest']}"
        what = f"is in the hub's cache in part ({folder})"
    options = (["--repo-type", kind] if not model else []) + (["--revision", revision] if revision else [])
    place = repo.partition("/")[2]
    fetch = shlex.join(["hf", "download", repo, *options, "--local-dir", place])
    raise ConfigError(f"{flag} {name}: {what}; fetch it with `{fetch}`, and give {flag} {place}{found['rest']}")


def _is_whole(folder: Path, needed: str) -> bool:
    """As far as the names of files tell: one that is 3 of 8 has seven beside it. What was fetched for its
    configuration alone, or read as a stream, lies there in part."""
    found = ((_PART.match(str(path)), path.suffix) for path in folder.rglob("*"))
    parts = Counter((*match.groups(), kind) for match, kind in found if match)
    return any(folder.glob(needed)) and all(count >= int(number) for (_, number, _), count in parts.items())
