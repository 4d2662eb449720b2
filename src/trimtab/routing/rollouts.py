"""What an inference engine recorded with its samples, laid out as the decisions of a training batch.

Engines give one array [rows, layers, K] for each sample: vLLM and TensorRT-LLM int16, prime-rl uint8 or uint16, SGLang
the bytes of int32, in base64. Rows are tokens in order, the last sampled one often missing; layers are the MoE layers
alone (TensorRT-LLM) or all of them, dense ones filled with anything.

Legend: B sequences, L positions, K experts per token.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import ConfigError, InputError
from trimtab.routing.port import OWN, RouterInfo
from trimtab.routing.replay import Decisions
from trimtab.validation import holds_ids, wide_ids


def lay_out(
    samples: Sequence[Any], routers: Sequence[tuple[RouterInfo, int]], total: int, *, attention_mask: Tensor | None,
    position_ids: Tensor | None, start_len: int | Sequence[int] | None, counted: str,
) -> Decisions:  # fmt: skip
    """See `trimtab.rollout_decisions`. routers: each with the number of its layer, of `total` in all."""
    sizes = {(info.num_experts, info.top_k) for info, _ in routers}
    if len(sizes) > 1 or len({info.family == OWN for info, _ in routers}) > 1:
        raise ConfigError(f"rollout_decisions: routers of different kinds, (experts, per token) are {sorted(sizes)}")
    ((num_experts, top_k),) = sizes
    places = _sequences(attention_mask, position_ids)
    if len(samples) != len(places):
        raise InputError(f"records of {len(samples)} samples, but the batch has {len(places)} sequences", phase="route")
    start = 0 if start_len is None else start_len
    starts = [start] * len(samples) if isinstance(start, int) else list(start)
    if len(starts) != len(samples):
        raise InputError(f"start_len has {len(starts)} numbers for {len(samples)} samples", phase="route")
    shape = (attention_mask if attention_mask is not None else position_ids).shape  # type: ignore[union-attr]
    ids = torch.full((shape[0] * shape[1], len(routers), top_k), -1)
    for i, (sample, at, begin) in enumerate(zip(samples, places, starts, strict=True)):
        if sample is not None:
            record = _Record(f"{routers[0][0].family}, sample {i}", routers, total, num_experts, top_k, counted)
            rows = record.rows(sample, tokens=at.numel(), start=begin)
            if start_len is None and rows.shape[0] < at.numel() - 1:
                raise record.wrong(
                    f"{rows.shape[0]} rows for {at.numel()} tokens, of which only the last one may have none: say by "
                    "start_len= at which token they begin, 0 if the last ones are missing"
                )
            ids[at[begin : begin + rows.shape[0]]] = rows
    short = torch.int16 if num_experts < 2**15 - 1 else torch.int32
    whole = ids.view(*shape, len(routers), top_k).to(short)
    return Decisions(ids=whole, num_experts=num_experts, layers=tuple(info.name for info, _ in routers))


def _sequences(attention_mask: Tensor | None, position_ids: Tensor | None) -> list[Tensor]:
    """The flat places [n] in [B, L] of each sequence's tokens, in the order of the batch."""
    given = [t for t in (attention_mask, position_ids) if t is not None]
    if not given or any(t.dim() != 2 or t.shape != given[0].shape for t in given):
        shapes = [tuple(t.shape) for t in given]
        raise InputError(f"an attention_mask or position_ids of [B, L] is needed, or both, got {shapes}", phase="route")
    B, L = given[0].shape
    real = torch.ones(B, L, dtype=torch.bool) if attention_mask is None else attention_mask.cpu() != 0
    at = torch.arange(B * L).view(B, L)
    rows = [at[b][real[b]] for b in range(B)]
    if position_ids is None:
        return rows
    found: list[Tensor] = []
    for row in rows:
        positions = position_ids.cpu().flatten()[row]
        begins = (positions[1:] != positions[:-1] + 1).nonzero().flatten() + 1
        found.extend(part for part in torch.tensor_split(row, begins) if part.shape[0])
    return found


@dataclass(frozen=True)
class _Record:
    """One sample's."""

    who: str
    routers: Sequence[tuple[RouterInfo, int]]
    total: int
    num_experts: int
    top_k: int
    counted: str

    @property
    def moe(self) -> list[int]:
        """The numbers of the layers that have a router."""
        return sorted({number for _, number in self.routers})

    def columns(self, given: int) -> list[int] | None:
        """Which of `given` layers are the model's routers'; None where that many fit neither way of counting."""
        numbers, moe = [number for _, number in self.routers], self.moe
        if given == self.total and self.counted in ("auto", "all"):
            return numbers
        return list(map(moe.index, numbers)) if given == len(moe) and self.counted in ("auto", "moe") else None

    def rows(self, sample: Any, *, tokens: int, start: int) -> Tensor:
        """[rows, routers, K] int64 of its tokens start .. start + rows - 1."""
        rows_NLK = self._decoded(sample, tokens - start) if isinstance(sample, str | bytes) else torch.as_tensor(sample)
        columns = self.columns(rows_NLK.shape[1]) if rows_NLK.dim() == 3 else None
        if columns is None or rows_NLK.shape[2] != self.top_k or not holds_ids(rows_NLK):
            raise self.wrong(
                f"expected integers [rows, layers, {self.top_k}] with {len(self.moe)} MoE layers or {self.total} "
                f"layers in all (layers={self.counted!r}), got {rows_NLK.dtype} {tuple(rows_NLK.shape)}"
            )
        if start < 0 or start + rows_NLK.shape[0] > tokens:
            raise self.wrong(f"{rows_NLK.shape[0]} rows from token {start} on, but the sequence has {tokens} tokens")
        ids = wide_ids(rows_NLK.cpu()).long()[:, columns]
        ids = ids.masked_fill(ids < 0, -1)
        self._check(ids, start)
        return ids

    def _decoded(self, sample: str | bytes, tokens: int) -> Tensor:
        """SGLang's: int32, base64; of all tokens, or of all but the last."""
        try:
            content = base64.b64decode(sample, validate=True)
        except ValueError as error:
            raise self.wrong(f"no base64: {error}") from error
        if len(content) % 4:
            raise self.wrong(f"{len(content)} bytes are no int32")
        flat = torch.frombuffer(bytearray(content), dtype=torch.int32) if content else torch.zeros(0, dtype=torch.int32)
        sizes = {(rows, given) for rows in (tokens - 1, tokens) for given in (self.total, len(self.moe))}
        fits = [size for size in sizes if size[0] * size[1] * self.top_k == flat.numel()]
        if len(fits) != 1:
            raise self.wrong(
                f"{flat.numel()} ids of int32 are not those of {tokens} tokens, nor of all but the last, by "
                f"{self.total} layers or the MoE layers alone and {self.top_k} experts"
            )
        return flat.view(*fits[0], self.top_k)

    def _check(self, ids: Tensor, start: int) -> None:
        ordered = ids.sort(-1).values
        twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
        wrong = twice | (ids >= self.num_experts).any(-1)
        for row, column in wrong.nonzero()[:1].tolist():
            raise self.wrong(
                f"token {start + row} has experts {ids[row, column].tolist()} of {self.num_experts} in layer "
                f"{self.routers[column][0].name}: a token without a record is -1"
            )

    def wrong(self, problem: str) -> InputError:
        return InputError(f"{self.who}: {problem}", phase="route")
