"""Megatron-Core's MoE layer over the ledger's groups: its own dispatchers and experts, or trimtab in their places.

Its router throughout: softmax over all experts, top-k, not normalized, computed in float32. Experts are SequentialMLP,
which needs no TransformerEngine. Replayed ids go in through a forward hook on the router, as a router that gives fewer
than K, or one expert twice, would give them. Megatron-Core 0.16 to 0.19.

Legend: l positions of this rank, B sequences, H model dim, T = l * B tokens, K experts per token, E experts, e experts
of this rank, F hidden dim, f = F over the ranks that split it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor, nn

from peers.subject import TWICE, everyone, first_reason, residual
from trimtab.errors import InputError
from trimtab.integrations.megatron import use
from trimtab.integrations.megatron.linears import GroupedColumn, GroupedRow
from trimtab.layout import shard_cuts
from trimtab.verify.implementation import Outcome, Place, Share, Subject
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import LayerWeights, Sizes

GroupedSubmodules = getattr(megatron_experts, "GroupedMLPSubmodules", MLPSubmodules)  # a class of its own from 0.18 on


class Impl:
    """Megatron's own: all-to-all in front of SequentialMLP."""

    name = "megatron"
    refusal: type[Exception] = Exception
    dispatcher = "alltoall"

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        t = topology
        lengths = [{pattern.length(t, d, i) for i in range(t.tp)} for d in range(t.dp)]
        lacking = {
            "its padding mask is for the balance losses: padding is routed as any token is": pattern.masked > 0,
            "sequence parallelism cuts a sequence evenly": t.tp > 1 and any(len(found) > 1 for found in lengths),
            f"it has no transport {t.transport}": t.transport not in ("local", "alltoall"),
            "it has no ordered combine": t.combine == "ordered",
            "in its all-to-all the ranks that split an expert lie side by side; in the ledger's meshes they do not": (
                t.ep > 1 and t.etp > 1 and self.dispatcher == "alltoall"
            ),
            "its routing map holds an expert once a token": pattern.name in TWICE,
            "it promises no error for a NaN, which goes through as in PyTorch": pattern.spoil == "nan",
        }
        return first_reason(lacking | _shared(t, pattern))

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        return Layers(place, sizes, weights, self.dispatcher, self.spec(place.topology, sizes))

    def spec(self, topology: Topology, sizes: Sizes) -> Any:
        """What a layer is built from."""
        return get_moe_module_spec(use_te=False, num_experts=sizes.num_experts, moe_grouped_gemm=False)


class AllGather(Impl):
    """Megatron's own: all-gather in front of SequentialMLP."""

    name = "megatron-allgather"
    dispatcher = "allgather"


class Trimtab(Impl):
    """trimtab in Megatron's layer: dispatch, experts and combine."""

    name = "megatron-trimtab"
    refusal: type[Exception] = InputError
    experts = True
    router: Literal["megatron", "trimtab"] = "megatron"

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        return first_reason(_shared(topology, pattern))

    def spec(self, topology: Topology, sizes: Sizes) -> Any:
        transport = "alltoall" if topology.transport == "local" else topology.transport
        stock = super().spec(topology, sizes)
        options: Any = {"transport": transport, "combine": topology.combine}
        return use(self.of(stock), experts=self.experts, router=self.router, **options)

    def of(self, stock: Any) -> Any:
        """The spec of Megatron's that ours goes into."""
        return stock


class TrimtabRouter(Trimtab):
    """The same behind trimtab's router."""

    name = "megatron-trimtab-router"
    router = "trimtab"


class TrimtabDispatcher(Trimtab):
    """trimtab's dispatch and combine around Megatron's SequentialMLP."""

    name = "megatron-trimtab-dispatcher"
    experts = False


class TrimtabLinears(TrimtabDispatcher):
    """The same around Megatron's TEGroupedMLP, whose grouped linears are trimtab's."""

    name = "megatron-trimtab-linears"

    def of(self, stock: Any) -> Any:
        inside = stock.submodules if isinstance(stock, ModuleSpec) else stock.keywords["submodules"]
        linears = GroupedSubmodules(linear_fc1=GroupedColumn, linear_fc2=GroupedRow)
        inside.experts = ModuleSpec(module=megatron_experts.TEGroupedMLP, submodules=linears)
        return stock


def _shared(t: Topology, pattern: Pattern) -> dict[str, bool]:
    """What neither Megatron's layer nor ours in its place can be asked for here."""
    return {
        "its data parallelism is its own DDP, which is not wired": t.data != "none",
        "it has no loss per sequence over context-parallel ranks": t.cp > 1,
        "with tensor parallelism its MoE wants sequence parallelism: a rank has its own positions": (
            t.tp > 1 and t.tokens != "sharded"
        ),
        "it leaves open which of equal scores is chosen": pattern.ties,
        "its routing map holds no ids, so none is out of range": pattern.spoil == "id",
    }


class Groups:
    """Megatron's process groups, from the ledger's meshes."""

    def __init__(self, place: Place) -> None:
        t, experts, dense = place.topology, place.experts, place.dense
        self.ep, self.etp, self.edp = (experts[name].get_group() for name in ("ep", "etp", "edp"))
        first = place.rank - place.rank % (t.ep * t.etp)
        alone = _group([place.rank])
        self.all = _group(list(range(t.ranks)))
        self.given = given = ProcessGroupCollection()
        given.ep, given.expt_tp, given.expt_dp = self.ep, self.etp, self.edp
        given.tp_ep = _group(list(range(first, first + t.ep * t.etp)))
        given.tp = given.tp_cp = dense["tp"].get_group()
        given.dp = given.dp_cp = dense["dp"].get_group()
        given.cp = given.pp = alone
        held = vars(parallel_state)  # all that Megatron keeps globally and reads here
        held["_GLOBAL_MEMORY_BUFFER"] = held["_GLOBAL_MEMORY_BUFFER"] or GlobalMemoryBuffer()
        given.tp_dp_cp = self.all
        if "expt_dp_gtp_remat" in ProcessGroupCollection.__dataclass_fields__:  # from 0.19 on
            given.expt_dp_gtp_remat, given.gtp_remat, given.expt_gtp_remat = self.edp, alone, alone


def _group(ranks: list[int]) -> Any:
    """Called by its members alone."""
    return dist.new_group(ranks, use_local_synchronization=True)


def _config(t: Topology, sizes: Sizes, dispatcher: str) -> Any:
    return TransformerConfig(
        num_layers=sizes.layers, hidden_size=sizes.dim, num_attention_heads=t.tp, num_moe_experts=sizes.num_experts,
        moe_ffn_hidden_size=sizes.hidden, moe_router_topk=sizes.top_k, moe_router_pre_softmax=True,
        moe_router_dtype="fp64" if sizes.dtype == torch.float64 else "fp32",
        moe_router_load_balancing_type="none", moe_token_dispatcher_type=dispatcher,
        tensor_model_parallel_size=t.tp, sequence_parallel=t.tp > 1, expert_model_parallel_size=t.ep,
        expert_tensor_parallel_size=t.etp, add_bias_linear=False, gated_linear_unit=True,
        activation_func=nn.functional.silu, params_dtype=sizes.dtype, bf16=sizes.dtype == torch.bfloat16,
        use_cpu_initialization=True, perform_initialization=False,
    )  # fmt: skip


class Layers:
    """One topology's stack."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], dispatcher: str, spec: Any) -> None:
        self.place, self.groups = place, Groups(place)
        config = _config(place.topology, sizes, dispatcher)
        build = partial(build_module, spec) if isinstance(spec, ModuleSpec) else spec  # called itself from 0.18 on
        self.moes = [
            build(config=config, layer_number=i + 1, pg_collection=self.groups.given).to(place.device)
            for i in range(sizes.layers)
        ]
        self.replayed_TK: Tensor | None = None
        j, s = place.experts["ep"].get_local_rank(), place.experts["etp"].get_local_rank()
        experts, hidden = shard_cuts(sizes.num_experts, place.topology.ep), shard_cuts(sizes.hidden, place.topology.etp)
        f = slice(hidden[s], hidden[s + 1])
        for moe, w in zip(self.moes, weights, strict=True):
            moe.router.register_forward_hook(self._replay)
            up_e2FH = w.up_EID.view(sizes.num_experts, 2, sizes.hidden, sizes.dim)[experts[j] : experts[j + 1]]
            down_eHF = w.down_EDF[experts[j] : experts[j + 1]]
            with torch.no_grad():
                moe.router.weight.copy_(w.router_ED)
                for name, mine in (("linear_fc1", up_e2FH[:, :, f].flatten(1, 2)), ("linear_fc2", down_eHF[..., f])):
                    for param, value in zip(_each(_params(moe, name)), mine, strict=True):
                        param.copy_(value)

    def _replay(self, router: Any, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The router's outputs, of the replayed experts: their scores are live. One chosen twice counts twice.

        In float64 the scores of its own choice are taken anew: its softmax is in float32 even then.
        """
        ids_TK, (probs_TE, map_TE) = self.replayed_TK, output
        if map_TE.dtype != torch.bool:  # trimtab's: weights and ids
            if ids_TK is None:
                return output
            scores_TE = router.gating(args[0]).view(len(ids_TK), -1).softmax(1, dtype=probs_TE.dtype)
            return scores_TE.gather(1, ids_TK.clamp_min(0)).masked_fill(ids_TK < 0, 0), ids_TK
        if ids_TK is not None and len(ids_TK) == len(probs_TE):  # else it was given one of padding
            counts_TE = torch.zeros_like(probs_TE).scatter_add_(
                1, ids_TK.clamp_min(0), (ids_TK >= 0).to(probs_TE.dtype)
            )
        elif probs_TE.dtype == torch.float64:
            counts_TE = map_TE.to(probs_TE.dtype)
        else:
            return output
        scores_TE = router.gating(args[0]).view_as(probs_TE).softmax(1, dtype=probs_TE.dtype)
        return scores_TE * counts_TE, counts_TE > 0

    def step(self, share: Share) -> Outcome:
        x_BlH = share.x_BlD.clone().requires_grad_()
        padding_Bl = None if share.mask_Bl is None else ~share.mask_Bl
        self.replayed_TK = None if share.ids_BlK is None else share.ids_BlK.transpose(0, 1).flatten(0, 1)
        for moe in self.moes:
            moe.zero_grad()
        h_lBH = x_BlH.transpose(0, 1).contiguous()
        y_BlH = residual(self.moes, h_lBH, lambda moe, h: moe(h, padding_mask=padding_Bl)[0]).transpose(0, 1)
        torch.autograd.backward(y_BlH, share.dy_BlD)
        assert x_BlH.grad is not None
        return Outcome(y=y_BlH, dx=x_BlH.grad, grads=self._gradients())

    def _gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients of the mean loss over the data-parallel ranks."""
        found: dict[str, Tensor | None] = {}
        for i, moe in enumerate(self.moes):
            router_1EH = self._mean([moe.router.weight], self.groups.all)
            up_efH = self._mean(_params(moe, "linear_fc1"), self.groups.edp)
            down_eHf = self._mean(_params(moe, "linear_fc2"), self.groups.edp)
            found[f"{i}.router"] = None if router_1EH is None else router_1EH[0]
            found[f"{i}.up"] = None if up_efH is None else self._whole(torch.stack(up_efH.chunk(2, 1), 1)).flatten(1, 2)
            found[f"{i}.down"] = None if down_eHf is None else self._whole(down_eHf)
        return found

    def _mean(self, params: Sequence[nn.Parameter], group: Any) -> Tensor | None:
        """Gradients in a row, summed over a group. None where some rank has none, on all ranks alike."""
        absent = torch.tensor([param.grad is None for param in params]).sum().to(self.place.device)
        dist.all_reduce(absent, group=self.groups.all)
        if absent:
            return None
        total = torch.stack(_each(param.grad for param in params))
        dist.all_reduce(total, group=group)
        return total / self.place.topology.dp

    def _whole(self, grad: Tensor) -> Tensor:
        """All experts of all ranks: [e, ., f, ...] to [E, ., F, ...]."""
        return everyone(everyone(grad, self.groups.etp, 2), self.groups.ep)


def _params(moe: Any, linear: str) -> list[nn.Parameter]:
    """One linear's weights, in the order of experts: one of all experts, or one each."""
    return [param for name, param in moe.experts.named_parameters() if f"{linear}.weight" in name]


def _each(weights: Iterable[Any]) -> list[Any]:
    return [w for weight in weights for w in (weight if weight.dim() == 3 else [weight])]
