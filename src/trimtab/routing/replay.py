"""The routing decisions of a model as one value, [B, L, layers, K]: cut, joined, written, read. `trimtab.record` makes
it, `trimtab.replay` takes it.

Legend: B sequences, L positions, T = B * L tokens, K experts per token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trimtab.atomic_write import whole
from trimtab.errors import InputError
from trimtab.validation import holds_ids, wide_ids

FORMAT = "trimtab.decisions"
VERSION = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions:
    """The decisions of every MoE layer for the same tokens: what rollout engines hand over with their samples.

    ids: [B, L, layers, K], int8, int16, int32 or int64: an expert 0..E - 1, -1 for none, -2 - e for an expert e that
        was picked but had no room, so that replayed weights are normalized over the same picks.
    num_experts: E, of every layer.
    layers: the names of the layers, in the order of the third dim.

    Where every pick had room, `ids[:, :, i]` is also what `MoE(..., ids=)` takes.

    Raises:
        InputError: shapes, dtypes or ids other than these.
    """

    ids: Tensor
    num_experts: int
    layers: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.ids.dim() != 4 or not holds_ids(self.ids) or not self.ids.dtype.is_signed:
            raise InputError(
                "decisions must be [B, L, layers, K] of int8, int16, int32 or int64, which hold -1 as well, "
                f"got {self.ids.dtype} {tuple(self.ids.shape)}"
            )
        if self.ids.shape[2] != len(self.layers) or len(set(self.layers)) != len(self.layers):
            raise InputError(f"decisions for {self.ids.shape[2]} layers, but the names are {self.layers}")
        ids = wide_ids(self.ids)
        if bool(((ids < -1 - self.num_experts) | (ids >= self.num_experts)).any()):
            low, high = int(ids.min()), int(ids.max())
            raise InputError(
                f"decisions name experts {low}..{high}, the model has 0..{self.num_experts - 1} (-1 for none)"
            )

    def cut(self, start: int, end: int) -> Decisions:
        """Those of the positions start..end - 1 of every sequence: what a rank that holds these replays."""
        return replace(self, ids=self.ids[:, start:end])

    @classmethod
    def join(cls, parts: Sequence[Decisions], dim: int = 1) -> Decisions:
        """Parts put together, along positions (1) or sequences (0).

        Raises:
            InputError: parts of other layers or another number of experts.
        """
        found = [(p.num_experts, p.layers) for p in parts]
        if len(set(found)) != 1:
            raise InputError(f"cannot join decisions of different models, (experts, layers) are {found}")
        return replace(parts[0], ids=torch.cat([p.ids for p in parts], dim))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file that `load` reads; two bytes a slot with less than 32,767 experts. Whole or not at all."""
        ids = self.ids.to("cpu", torch.int16 if self.num_experts < 2**15 - 1 else torch.int32).contiguous()
        content = {"format": FORMAT, "version": VERSION, "ids": ids, "num_experts": self.num_experts}
        with whole(Path(path)) as unfinished:
            torch.save(content | {"layers": list(self.layers)}, unfinished)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Decisions:
        """Read what `save` wrote. Runs no code from the file.

        Raises:
            InputError: not such a file, or of another version.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # what torch.load raises for a file of another kind depends on its first bytes
            raise InputError(f"{path} is no file of routing decisions ({type(error).__name__})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InputError(f"{path} is no file of routing decisions")
        if content.get("version") != VERSION:
            raise InputError(f"{path} has version {content.get('version')}, this trimtab reads {VERSION}")
        missing = {"ids", "num_experts", "layers"} - content.keys()
        if missing:
            raise InputError(f"{path} lacks {sorted(missing)}")
        return cls(ids=content["ids"], num_experts=content["num_experts"], layers=tuple(content["layers"]))
