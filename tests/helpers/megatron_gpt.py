"""A small GPTModel of Megatron-Core, trained as Megatron trains: by its DDP, optimizer, schedules and checkpoints.

The global batch of a step is the same for every layout. Between two kinds of a run nothing differs but its MoE layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.megatron_cpu import megatron, megatron_ranks, parallel_state, spec_utils

SEQUENCE, VOCABULARY, GLOBAL_BATCH = 16, 64, 8
KINDS: dict[str, dict[str, Any]] = {
    "experts": {},
    "exchange": {"experts": False},
    "grouped": {},  # Megatron's TEGroupedMLP with our linears
    "each": {},  # ours with a parameter of each expert
    "router": {"router": "trimtab"},
    "ordered": {"combine": "ordered"},
}
"""What `use` is given. "megatron", its all-to-all before SequentialMLP, uses nothing."""
Steps = list[tuple[float, float]]
"""Loss of the global batch and norm of the gradients, of each step."""


@dataclass(frozen=True)
class Layout:
    """How Megatron cuts a model over so many ranks."""

    ranks: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1


@dataclass(frozen=True)
class Run:
    """model, ddp: options of TransformerConfig and DistributedDataParallelConfig. frozen: what parameters' names hold
    that do not train."""

    kind: str = "megatron"
    distributed_optimizer: bool = False
    steps: int = 6
    micro_batches: int = 2
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()


def config_of(layout: Layout, run: Run) -> Any:
    chosen: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "num_moe_experts": 8,
        "moe_ffn_hidden_size": 48, "moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2, "moe_token_dispatcher_type": "alltoall", "moe_shared_expert_intermediate_size": 24,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "bias_activation_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
        "masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "init_method_std": 0.1, "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32, "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp, "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp, "sequence_parallel": layout.tp > 1,
    }  # fmt: skip
    return megatron.core.transformer.TransformerConfig(**chosen | run.model)


def spec_of(config: Any, run: Run) -> Any:
    """Of the decoder, dense layers among it where `moe_layer_freq` says so."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from trimtab.integrations.megatron import Experts, use
    from trimtab.integrations.megatron.linears import grouped_mlp

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if run.kind == "megatron":
        return spec
    each = spec_utils.ModuleSpec(module=Experts, params={"single_parameter": False})
    experts = {"grouped": {"experts": grouped_mlp()}, "each": {"experts": each}}
    return use(spec, **KINDS[run.kind] | experts.get(run.kind, {}))


def build(layout: Layout, run: Run) -> Any:
    """The model of this rank, drawn by one seed. TEGroupedMLP draws in another order, and gets what the others have."""
    if run.kind != "grouped":
        return _drawn(layout, run)
    model, drawn = _drawn(layout, run), _drawn(layout, replace(run, kind="megatron")).state_dict()
    wanted = {
        re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.(?:weight|bias))", r"\2\1", name): w for name, w in drawn.items()
    }
    missing, unexpected = model.load_state_dict(wanted, strict=False)
    assert all("_extra_state" in name for name in missing + unexpected), (missing, unexpected)
    return model


def _drawn(layout: Layout, run: Run) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(layout, run)
    torch.manual_seed(1234)
    spec = spec_of(config, run)
    last, more = parallel_state.is_pipeline_last_stage(), {}
    if config.mtp_num_layers and last:
        more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=last, position_embedding_type="rope", **more,
    )  # fmt: skip


def positions_and_mask(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Megatron's mask is True where a position may not look."""
    length = ids.shape[1]
    return torch.arange(length).expand_as(ids), torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


def forward_step(batch: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    ids, labels = next(batch)
    out = model(ids, *positions_and_mask(ids), labels=labels)

    def loss_of(out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = out.float().mean()
        return loss, {"loss": loss.detach().clone()}  # Megatron divides the loss in place

    return out, loss_of


class Training:
    """A model in Megatron's DDP, with its optimizer."""

    def __init__(self, layout: Layout, run: Run) -> None:
        core = megatron.core
        self.run, model = run, build(layout, run)
        for name, param in model.named_parameters():
            param.requires_grad_(not any(part in name for part in run.frozen))
        options = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": run.distributed_optimizer} | run.ddp
        self.model = core.distributed.DistributedDataParallel(
            model.config, core.distributed.DistributedDataParallelConfig(**options), model
        )
        settings = core.optimizer.OptimizerConfig(
            optimizer="adam", lr=2e-3, weight_decay=0.01, clip_grad=1.0, params_dtype=torch.float32,
            use_distributed_optimizer=run.distributed_optimizer,
            overlap_param_gather=run.ddp.get("overlap_param_gather", False),
        )  # fmt: skip
        self.optimizer = core.optimizer.get_megatron_optimizer(settings, [self.model], use_gloo_process_groups=False)
        model.config.finalize_model_grads_func = core.distributed.finalize_model_grads
        model.config.grad_scale_func = self.optimizer.scale_loss
        model.config.no_sync_func = self.model.no_sync

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches: tokens and labels."""
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=drawn)
        ids = ids.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
        parts = ids.chunk(self.run.micro_batches)
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]

    def step(self, step: int) -> tuple[float, float]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self.batches(step)
        kept = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(parts), model=[self.model], num_microbatches=len(parts),
            seq_length=SEQUENCE, micro_batch_size=parts[0][0].shape[0], forward_only=False,
        )  # fmt: skip
        updated, norm, _ = self.optimizer.step()
        assert updated
        losses = [each["loss"].item() for each in kept]  # of a pipeline's last stage
        total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
        dist.all_reduce(total)
        return (total[0] / total[1]).item(), float(norm)

    def state(self, loading: bool) -> dict[str, Any]:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self.state(loading=False), str(folder))

    def load(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        if self.run.distributed_optimizer:
            self.step(99)  # without TransformerEngine and Apex, Megatron loads only into an optimizer that has a state
        loaded = dist_checkpointing.load(self.state(loading=True), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


def trained(layout: Layout, runs: Sequence[Run], *, deadline: float = 180.0) -> list[Steps]:
    """Each run by itself; collective results are the same on every rank."""
    return _alike(_on_ranks(layout, _train, runs, deadline=deadline))


def resumed(layout: Layout, runs: Sequence[Run], folder: Path, *, deadline: float = 180.0) -> Steps:
    """One after the other, each with the checkpoint that the one before has saved."""
    (steps,) = _alike(_on_ranks(layout, _resume, runs, folder, deadline=deadline))
    return steps


def assert_alike(steps: Steps, expected: Steps) -> None:
    """To six digits."""
    off = max(abs(a / b - 1) for pairs in zip(steps, expected, strict=True) for a, b in zip(*pairs, strict=True))
    assert off < 5e-6, (off, steps, expected)


def _alike(answers: list[list[Steps]]) -> list[Steps]:
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def _on_ranks(layout: Layout, fn: Any, *args: Any, deadline: float) -> list[Any]:
    sizes = {name: size for name, size in vars(layout).items() if name != "ranks"}
    return megatron_ranks(fn, layout.ranks, layout, *args, **sizes, deadline=deadline)


def _train(layout: Layout, runs: Sequence[Run]) -> list[Steps]:
    answers = []
    for run in runs:
        training = Training(layout, run)
        answers.append([training.step(step) for step in range(run.steps)])
    return answers


def _resume(layout: Layout, runs: Sequence[Run], folder: Path) -> list[Steps]:
    seen: Steps = []
    for i, run in enumerate(runs):
        training = Training(layout, run)
        if i:
            training.load(folder / str(i - 1))
        seen += [training.step(step) for step in range(len(seen), len(seen) + run.steps)]
        if run is not runs[-1]:
            training.save(folder / str(i))
    return [seen]
