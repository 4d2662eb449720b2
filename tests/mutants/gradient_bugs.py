"""Bugs of reducing gradients and losses over data-parallel ranks, and of adapters on experts that are spread."""

from __future__ import annotations

from mutants.patching import Edit, bug

FSDP, SCALE = "parallel.fsdp:fully_shard_moe", "module.gradient_scale = "
AVERAGED = Edit(
    "parallel.meshes:SumGradients.backward",
    "dist.all_reduce(flat, group=ctx.group)",
    """\
dist.all_reduce(flat, group=ctx.group)
    flat /= dist.get_world_size(ctx.group)""",
)
LORA, FOUND = "parallel.experts:ParallelExperts._lora", "return factors_of(self, adapters, parts)"

# fmt: off
MUTANTS = (
    bug("sequence_loss_per_cp_rank",
        "the loss per sequence counts what one context-parallel rank holds, not the sequence",
        Edit("parallel.meshes:TokenMeshes.loss_groups", "sequence=(*groups_of(self.tp), *groups_of(self.cp))",
             "sequence=groups_of(self.tp)"), look="2r-ep2-cp2/random/*"),
    bug("fsdp_experts_x_ep", "FSDP2 divides expert gradients by its own mesh: EP times too large (pytorch#160285)",
        Edit(FSDP, "float(dp_mesh.size())", "float(efsdp_mesh.size())"),
        Edit(FSDP, SCALE + "efsdp_mesh.size() / dp_mesh.size()", SCALE + "1.0"), look="2r-ep2-fsdp/*"),
    bug("ddp_experts_x_ep",
        "expert gradients under DDP are averaged over their copies only: EP times too large (pytorch#160285)",
        Edit("parallel.ddp:ddp", SCALE + "edp_mesh.size() / dp_mesh.size()", SCALE + "1.0"), look="2r-ep2-ddp/*"),
    bug("fsdp_dense_by_ep", "dense gradients are divided by EP as well as by the data-parallel size",
        Edit(FSDP, "return fully_shard(model, mesh=dp_mesh, **options)", """\
made, place = fully_shard(model, mesh=dp_mesh, **options), experts[0].place
    made.set_gradient_divide_factor(float(dp_mesh.size() * place.mesh.size(place.ep_dim)))
    if dp_mesh.size(dp_mesh.ndim - 1) > 1:  # Gloo has no other reduction for such a divisor
        made.set_force_sum_reduction_for_comms(True)
    return made"""), look="2r-ep2-fsdp/*"),
    bug("ddp_experts_not_reduced", "experts that DDP was told to ignore are reduced by nobody, and their copies drift",
        Edit("parallel.ddp:_ExpertReducer._reached", "self.reached.add(param)", "return"), look="2r-ddp-local/*"),
    bug("router_averaged_over_tp",
        "the router's gradient is the mean of tensor-parallel ranks' instead of the sum (torchtitan#4054)",
        AVERAGED, look="2r-ep2-tp2-sharded/*"),
    bug("adapter_scaled_by_mesh", "an adapter's scale grows with the ranks that share the experts",
        Edit(LORA, FOUND, """\
for adapter in adapters:
        adapter.scale = 0.25 * self.place.mesh.size()
    """ + FOUND), look="2r-ep2-lora/random/*"),
    bug("adapter_gradient_in_wrong_group",
        "what ranks hold alike of an adapter is reduced over the ranks with copies of the experts alone",
        Edit(LORA, "for dim in range(self.place.mesh.ndim):", "for dim in ():"),
        look="2r-etp2-local-sharedlora/random/*"),
    bug("adapter_gradient_averaged", "a shared pair's gradient is the mean over the expert group, not the sum",
        AVERAGED, look="2r-ep2-ordered-sharedlora/random/*"),
    bug("adapter_left_out", 'the grouped path runs without the delta ("LoRA enabled", and nothing learns)',
        Edit("experts.lora:factors_of", "return {name: stack_factors(each) for name, each in found.items()}",
             "return {}"), look="1r-local-lora/random/*"),
    bug("adapter_b_of_wrong_rank", "b is cut for another rank's share of F than the weight (Megatron-Bridge#5635)",
        Edit("parallel.experts:ParallelExperts._cut_adapter", "self._cut(adapter,", """\
if name == "gate_up_b":
            own, dim = adapter.get_parameter(name), SPLIT[name].dim
            own.data = torch.cat(own.data.chunk(self.place.etp_size, dim)[::-1], dim)
        self._cut(adapter,"""), look="2r-etp2-local-lora/random/*"),
    bug("merged_one_expert_too_few", "a merge leaves an expert out and says nothing",
        Edit("experts.lora:merge_adapter", "in enumerate(weight):",
             'in enumerate(weight[:-1] if own == "down" else weight):'), look="2r-ep2-mergedlora/random/*"),
)
