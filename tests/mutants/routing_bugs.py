"""Bugs of the routing decision, and with what should not be computed on: padding, dropped slots, bad ids, NaN."""

from __future__ import annotations

from mutants.patching import Edit, bug

ROUTE, DISPATCH = "routing.router:Router.forward", "dispatch.dispatcher:Dispatcher._dispatch"
WEIGHTS, LOADS = "chosen, decision.complete)", "loads_E = chosen_E if ids is chosen else count_ids(ids, c.num_experts)"
SLOT_WEIGHTS, TAKEN = "experts.passes:Pass.begin", "slot_weights(self.w, self.plan, low[0] is not None)"

# fmt: off
MUTANTS = (
    bug("scores_in_bf16", "router scores are rounded to bfloat16 (torchtitan, by backend)",
        Edit(ROUTE, ".of(logits)", ".of(logits.bfloat16()).to(logits.dtype)")),
    bug("detached_weights", "combine weights are detached: the router has no gradient (the detached combine)",
        Edit(ROUTE, WEIGHTS, WEIGHTS + ".detach()")),
    bug("weights_in_wrong_k_order", "the weights of a token's experts come in another order than its experts",
        Edit(ROUTE, WEIGHTS, WEIGHTS + ".flip(1)")),
    bug("ties_to_higher_id",
        "a tie goes to the higher expert id, as top-k leaves open (NeMo Automodel#3325: near-ties flip)",
        Edit("routing.select:top", "return _top(scores_TE, k)",
             "return scores_TE.shape[1] - 1 - _top(scores_TE.flip(1), k)"), look="1r-local/ties/*"),
    bug("weights_applied_twice", "the routing weight is applied in the experts and again in the combine",
        Edit(SLOT_WEIGHTS, TAKEN, TAKEN + ".square()")),
    bug("weights_applied_nowhere", "experts leave the weight to the combine and the combine leaves it to the experts",
        Edit(SLOT_WEIGHTS, TAKEN, TAKEN + ".fill_(1)")),
    bug("loads_counted_twice", "load counters are doubled by recompute (torchtitan, comment on its counters)",
        Edit(ROUTE, "loads_E=loads_E", "loads_E=2 * loads_E")),
    bug("loads_of_replicas", "every tensor-parallel rank counts the tokens of all of them: loads x TP",
        Edit("parallel.moe:ParallelMoE.forward", "with standing_in(places, summed):\n", """\
with standing_in(places, summed):
        out = super().forward(x, **given)
        if self.shares:
            dist.all_reduce(out.loads_E, group=group)
        return out
"""), look="3r-ep3-tp3-replicated-fsdp/*"),
    bug("loads_of_padding", "padding is kept from dispatch but joins the load counters",
        Edit(ROUTE, LOADS, LOADS + """
    loads_E = count_ids(plain.topk(c.top_k).indices if ids_TK is None else ids_TK.long(), c.num_experts)"""),
        look="1r-local/*masked/*"),
    bug("pack_is_one_sequence",
        "a pack of documents is one sequence to the sequence-wise balance loss (Megatron-LM#6108)",
        Edit("routing.losses:_sequences", "if ids_T is None:", "if ids_T is None or ids_T is not None:"),
        look="1r-local-packed/*"),
    bug("padding_dispatched", "padding is masked from the losses and loads but still dispatched (Megatron-LM)",
        Edit("moe:MoE._take", "x_TD = x_TD.masked_fill(~mask_T[:, None], 0)", "pass"),
        Edit(ROUTE, "real_T = self.config, token_mask_T", "real_T = self.config, None"),
        Edit(ROUTE, LOADS, LOADS + """
    if token_mask_T is not None:
        loads_E = count_ids(ids.masked_fill(~token_mask_T[:, None], -1), c.num_experts)"""),
        look="2r-ep2-cp2/all_masked/*"),
    bug("wild_ids_clamped", "an id out of range is clamped to the last expert and nobody is told",
        Edit(DISPATCH, "if self.transport is None:", """\
ids_TK = ids_TK.clamp(-1, self.num_experts - 1)
    if self.transport is None:"""), look="1r-local/bad_id/*"),
    bug("minus_one_is_last_expert", "the id -1 of a dropped slot wraps around to the last expert",
        Edit(ROUTE, "self._bring(x_TD.device)", """\
self._bring(x_TD.device)
    ids_TK = ids_TK if ids_TK is None else ids_TK.where(ids_TK != -1, self.config.num_experts - 1)"""),
        look="1r-local/dropped/*"),
    bug("dropped_to_expert_0", "dropped slots are dispatched to expert 0, with its weight",
        Edit(ROUTE, "basis = Basis(", """\
weights, ids = weights.where(ids >= 0, logits.softmax(-1)[:, :1].expand_as(weights)), ids.clamp_min(0)
    basis = Basis("""), look="1r-local/dropped/*"),
    bug("nan_weights_pass", "NaN logits route tokens somewhere and train on",
        Edit("dispatch.checks:_bad", " | ((w_TK.detach() * 0 != 0) & (ids_TK >= 0))", ""),
        look="1r-local/nan_logits/*"),
    bug("bad_input_raised_alone",
        "the rank with the bad input raises and its peers wait for it (a hang that names nobody)",
        Edit("dispatch.checks:raise_if_bad", "if bad}",
             "if bad and (not ranked or rank == torch.distributed.get_rank())}"),
        look="2r-ep2/bad_id/*", hangs=True),
    bug("dx_of_dropped_tokens", "a token whose slots are all dropped gets the output's gradient instead of zeros",
        Edit("experts.mlp:_backward", "return (None, dx if need_x", """\
dx = torch.where((call.plan.row_csr.indptr.diff() == 0)[:, None], dy, dx)
    return (None, dx if need_x"""), look="1r-local/*dropped/*"),
)
