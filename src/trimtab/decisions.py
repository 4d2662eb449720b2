"""`trimtab.record` and `trimtab.replay`, for models with our own routers, those of transformers, or both.

    with trimtab.record(model) as recording:
        model(tokens)
    recording.decisions().save("step.pt")

    with trimtab.replay(model, Decisions.load("step.pt")):
        model(tokens)                               # the same experts; scores, weights and losses are live

Both see the tokens that this rank routes. A forward that runs again in a checkpoint is recorded once.

Legend: B sequences, L positions, T = B * L tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import observing as observing
from trimtab.integrations.transformers.routers.observe import own_ports
from trimtab.routing.observers import Recorder, Replayer
from trimtab.routing.replay import Decisions
from trimtab.routing.rollouts import Layers, lay_out


@contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """Keep the decisions that `model`'s routers take in its forwards inside, those that `replay` hands in too.

    A router that decides more than once in a forward of a transformers model (`inkling2_loop`) is recorded as NAME,
    NAME#2, and so on.

    Raises:
        ConfigError: the model has no router, or one of transformers' that cannot be told.
    """
    recorder = Recorder()
    with observing(model, recorder):
        yield recorder


@contextmanager
def replay(model: nn.Module, decisions: Decisions) -> Iterator[None]:
    """Every forward of `model` inside takes these decisions. `ids=` given to a layer of ours goes before them.

    Scores, weights and losses are live, from the scores of all experts: group limits and selection biases are skipped,
    normalization and scaling kept, and gradients reach the router. A token of -1 alone is decided live, but by a router
    of ours with a capacity or expert choice, where that says that no expert took it. What a checkpoint of transformers'
    or of torch's CheckpointWrapper runs again, behind the context too, takes the same decisions; around a
    `torch.utils.checkpoint` of your own, take the backward inside.

    Raises:
        ConfigError: the model has no router, or one of transformers' that cannot be told.
        InputError: decisions for other layers, or another number of experts, of all or per token; tokens of which some
            experts are -1 and others not, in a transformers model; in the forward, decisions for other tokens.
    """
    with observing(model, Replayer(decisions)):
        yield


def rollout_decisions(
    model: nn.Module,
    routed_experts: Sequence[Any],
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    start_len: int | Sequence[int] = 0,
    layers: Literal["auto", "moe", "all"] = "auto",
) -> Decisions:
    """Decisions to `replay` in a training batch from what an inference engine returned with its samples.

    Args:
        model: that will be trained, for its layers.
        routed_experts: for each sequence what vLLM, TensorRT-LLM and prime-rl return, integers [rows, layers, K] (an
            array or a tensor), or SGLang's base64 of int32; None for a sample without. Rows are its tokens from
            `start_len` on; the last ones may be missing.
        attention_mask: [B, L] of the batch: one sequence in each row, padded left or right.
        position_ids: [B, L] of a packed batch: a sequence begins where they do not go on by one. With an
            `attention_mask` beside it padding is left out; without, padding must have positions that go on.
        start_len: how many tokens of each sequence have no record, because their prefix was cached.
        layers: what the second dim counts: "moe" layers alone, or "all", dense ones too; "auto" goes by its size.

    Tokens without a record are -1: `replay` lets them be decided live.

    Raises:
        ConfigError: the model has no router, routers that cannot be told, or of different sizes.
        InputError: other numbers of samples, tokens, layers or experts than the batch and the model have.
    """
    own, theirs = own_ports(model), find_routers(model)
    infos = [port.info for port in own] or [place.info for place in theirs]
    if not infos:
        raise ConfigError(f"no Router in {type(model).__name__}: rollout_decisions is for models with MoE layers")
    numbers = tuple(range(len(own))) or tuple(place.layer for place in theirs)
    total, sizes = len(own) or theirs[0].layers, {(info.num_experts, info.top_k) for info in infos}
    if len(sizes) > 1 or (own and theirs):
        raise ConfigError(f"rollout_decisions: routers of different kinds, (experts, per token) are {sorted(sizes)}")
    ((num_experts, top_k),) = sizes
    found = Layers(
        names=tuple(info.name for info in infos), numbers=numbers, total=total, num_experts=num_experts, top_k=top_k,
        family=infos[0].family,
    )  # fmt: skip
    return lay_out(
        routed_experts, found, attention_mask=attention_mask, position_ids=position_ids, start_len=start_len,
        counted=layers,
    )  # fmt: skip
