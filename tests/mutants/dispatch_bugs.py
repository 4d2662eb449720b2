"""Bugs of counting, of sending rows out and of bringing them home; and with tokens that several ranks share."""

from __future__ import annotations

from mutants.patching import Edit, bug

DISPATCH, EXCHANGE = (f"dispatch.dispatcher:Dispatcher.{name}" for name in ("_dispatch", "_exchange"))
PLAN, PARTS = "dispatch.plan:plan_ranks", "dispatch.route:combine_parts"
TOKEN_CSR = "csr_of(slot_row_N, first_N, sort.tokens, num_rows, whole=True)"
SHARD, LAYER = "dispatch.sequence_shard:", "parallel.moe:ParallelMoE.forward"
TP3, EP2 = "3r-ep3-tp3-replicated-fsdp/*", "2r-ep2/*"

# fmt: off
MUTANTS = (
    bug("one_choice_per_rank", "a token with two experts on one rank is sent once and computed once",
        Edit(EXCHANGE, "ids_MK = ids_MK.mul_(mine).sub_(1)", """\
ids_MK = ids_MK.mul_(mine).sub_(1)
    ids_MK = ids_MK.masked_fill((ids_MK >= 0).cumsum(1) > 1, -1)"""), look=EP2),
    bug("last_expert_on_wrong_rank", "slots of the last expert are sent to rank 0",
        Edit("dispatch.plan:sort_by_rank", "ids_N = ids_TK.reshape(-1)",
             "ids_N = ids_TK.masked_fill(ids_TK == experts_per_rank * ranks - 1, 0).reshape(-1)"), look=EP2),
    bug("ranks_reversed", "the expert group's ranks are numbered against the mesh that cut the experts",
        Edit(DISPATCH, "if self.transport is None:", """\
e, good = self.experts_per_rank, (ids_TK >= 0) & (ids_TK < self.num_experts)
    mirrored = (self.ranks - 1 - ids_TK.div(e, rounding_mode="floor")) * e + ids_TK % e
    ids_TK = mirrored.where(good, ids_TK)
    if self.transport is None:"""), look=EP2),
    bug("first_rank_only", "combine takes the rows of a token's first rank and forgets the others",
        Edit(PLAN, "return RankPlan(", f"""\
csr = {TOKEN_CSR}
    some = csr.indptr.diff().clamp(max=1)
    return RankPlan("""),
        Edit(PLAN, f"token_csr={TOKEN_CSR}", """\
token_csr=Csr(
            indices=csr.indices[csr.indptr[:-1][some > 0]], indptr=torch.nn.functional.pad(some.cumsum(0), (1, 0))
        )"""), look=EP2),
    bug("ordered_by_arrival", "returned slots are dealt to tokens in the order of arrival",
        Edit(PLAN, "inverse_of(order_N), sort.kept_N", "sort.kept_N.cumsum(0) - 1, sort.kept_N"),
        look="2r-ep2-ordered/*"),
    bug("stale_rows",
        "where no row comes, the last call's rows are still there (Gloo all-to-all: stale data, no error)",
        Edit(PARTS, "first = parts[0]", """\
kept, tokens = globals().setdefault("_KEPT", {}), csr.indptr.shape[0] - 1  # by width
    if not parts[0].shape[0]:
        stale = [kept.get(part.shape[1], part).to(part.dtype) for part in parts]
        return [torch.cat((t, t.new_zeros(tokens, t.shape[1])))[:tokens] for t in stale]
    kept.update({part.shape[1]: combine_rows(part, csr) for part in parts})
    first = parts[0]"""), look=EP2),
    bug("unpermute_of_no_rows", "unpermute of no rows gives [0, D] instead of [T, D] (TransformerEngine)",
        Edit(PARTS, "first = parts[0]", """\
if not parts[0].shape[0]:
        return [part.new_zeros(0, part.shape[1]) for part in parts]
    first = parts[0]"""), look=EP2),
    bug("dw_not_reduced", "the gradient of a token's weights lacks what other ranks' experts say",
        Edit("dispatch.route:Dispatch.backward", "dx_TD, dw_TK = ", """\
each = dw.split(list(ctx.route.rows.incoming))
    dw = torch.cat([part * (rank == ctx.route.transport.rank) for rank, part in enumerate(each)])
    dx_TD, dw_TK = """), look=EP2),
    bug("plan_shared_by_layers",
        "the plan is kept by the module, not by the call: the next one overwrites it (torchtitan#2273, #1467)",
        Edit("dispatch.route:Combine.forward", "ctx.route, ctx.row_R", "Combine.last, ctx.row_R"),
        Edit("dispatch.route:Combine.backward", "ctx.route", "Combine.last"), look="2r-ep2/alternating/*"),
    bug("allgather_reads_padding", "the all-gather's table is read as if no rank's rows were padded",
        Edit("dispatch.all_gather:AllGather.combine", "parts = [rows[source, start:end]", """\
starts = [0, *accumulate(sum(row) for row in splits.everyone)]
    parts = [rows.flatten(0, 1)[starts[source] + start : starts[source] + end]"""), look="4r-ep4-allgather/*"),
    bug("slots_of_wrong_rows", "rows are spread to slots by one order and summed by another",
        Edit("dispatch.route:DispatchSlots.forward", "row_R)", "row_R.flip(0))"), look="1r-local-ordered/*"),
    bug("batch_1_offset",
        "shards are cut at local + T_local * rank, which is right for one sequence only (torchtitan#3604)",
        Edit(SHARD + "take_shard", "return x[", """\
lead, (start, end) = x.shape[:-2], cuts[rank : rank + 2]
    tokens = x.flatten(0, -2)[lead.numel() * start : lead.numel() * end]
    return tokens.view(*lead, end - start, x.shape[-1])
    return x["""), look=TP3),
    bug("joined_by_rank", "shards are put together rank after rank instead of by position (torchtitan#3604)",
        Edit(SHARD + "join_shards", "shards = [", """\
mine = [gathered[r, : lead.numel() * n] for r, n in enumerate(lengths)]
    return torch.cat(mine).view(*lead, sum(lengths), x.shape[-1])
    shards = ["""), look=TP3),
    bug("remainder_lost",
        "every rank takes L // ranks positions and the rest is nobody's (torchtitan#3577, #3619, #3622)",
        *(Edit(SHARD + name, "shard_cuts(", "(lambda size, ranks: [r * (size // ranks) for r in range(ranks + 1)])(")
          for name in ("shard", "unshard")), look=TP3),
    bug("replicas_double_counted",
        "the output's gradient, which every rank holds, is summed over the ranks: gradients x TP",
        Edit(SHARD + "_Moved.backward", "return _moved(", """\
if joined:
        dy = dy.clone()
        dist.all_reduce(dy, group=group)
    return _moved("""), look=TP3),
    bug("padded_by_repeats", "short shards are filled up with repeated tokens, and the gradient counts them",
        Edit(LAYER, "refuse_transforms(", """\
import torch

    length, longest = x.shape[-2], torch.tensor(x.shape[-2])
    if not self.shares:
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    more = (int(longest) - length) * (length > 0)
    given = {"x": x} | {name: t for name, t in given.items() if isinstance(t, Tensor)}
    given = {name: torch.cat((t, t[:, -1:].expand(-1, more, *t.shape[2:])), 1) for name, t in given.items()}
    refuse_transforms("""),
        Edit(LAYER, "with standing_in(places, summed):\n", """\
with standing_in(places, summed):
        out = super().forward(**given)
        repeats = out.y[:, length:].sum(1, keepdim=True)
        return out._replace(y=out.y[:, :length] + repeats - repeats.detach())  # cut off, but not from the gradient
"""), look="2r-ep2-tp2-sharded/u*/*"),
    bug("empty_rank_leaves", "a rank without tokens returns early and its peers wait in the exchange",
        Edit(LAYER, "group = self.tp_group", """\
if not x.numel() and self.dispatcher.transport is not None:
        loads = x.new_zeros(self.dispatcher.num_experts).long()
        return MoEOutput(y=x.clone(), losses={}, loads_E=loads, ids_TK=loads[:0, None])
    group = self.tp_group"""), look=EP2, hangs=True),
    bug("router_not_summed", "the router's gradient is not summed over tensor-parallel ranks (torchtitan#4054)",
        Edit(LAYER, "places = self._places()", "places = []"), look="2r-ep2-tp2-sharded/*"),
)
