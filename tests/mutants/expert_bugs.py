"""Bugs of the grouped GEMMs and of what is saved between them; and of what is handed to the compiled experts.

The compiled kernels' own self-test calls them directly, so it sees nothing of the latter. Where nothing was compiled
the experts run another way: there these bugs are in no code that runs, and survive.
"""

from __future__ import annotations

from mutants.patching import Edit, bug

PLAN, FORWARD, COMBINE = "experts.plan:plan_experts", "experts.passes:forward", "kernels.rows:combine_rows"
STATIC = Edit(PLAN, "static = by_default if static is None else static", "static, num_slots = True, None")
GATED, VALUES = "experts.activations:_Pointwise", "experts.product:Product._write_values"
WRITTEN = "self.kernels.grouped_wgrad(rows, d, block, there, add=adds[0])"
CPU_FORWARD, CPU_BACKWARD, CPU_FIELDS = (f"experts.on_cpu:{name}" for name in ("forward", "backward", "_fields"))
RUN, RANDOM = "kernels.backward(fields)", "1r-local/random/float32"

# fmt: off
MUTANTS = (
    bug("gate_and_up_swapped",
        "gate and up rows swapped by a converter that shapes cannot tell (transformers#47031)",
        Edit(f"{GATED}.forward", "gate, up = pre_nI", "up, gate = pre_nI"),
        Edit(f"{GATED}.backward", "gate, up = pre_nI", "up, gate = pre_nI"),
        Edit(f"{GATED}.backward", "d_gate, d_up = d_pre", "d_up, d_gate = d_pre")),
    bug("tail_not_zeroed", "rows beyond the last offset are unset and summed as if they were zeros (pytorch#193633)",
        STATIC, Edit(FORWARD, "return y, pre_RI", """\
y[:1] += out_RD[int(p.plan.row_csr.indptr[-1]) :].fill_(float("nan")).sum(0)
    return y, pre_RI"""), look="1r-local/dropped/*"),
    bug("tail_in_last_bag", "what a static plan has behind the last segment joins the last token's sum",
        STATIC, Edit(COMBINE, 'offsets = csr.indptr if csr.whole or rows_nD.device.type == "cpu" else cut_rest(csr)',
                     "offsets = csr.indptr[:-1]"), look="1r-local/dropped/*"),
    bug("no_gradient_without_tokens",
        "experts without tokens get None for a gradient (the gradient contract; DDP hangs on it)",
        Edit("experts.mlp:_backward", "return (None, dx if need_x", """\
found = found if call.plan.row_R.shape[0] else [None] * len(found)
    return (None, dx if need_x"""), look="1r-local/all_dropped/*"),
    bug("empty_expert_unwritten", "the weight gradient of a zero-size group is never written (pytorch#172439)",
        Edit(VALUES, WRITTEN, WRITTEN + """
            target[torch.tensor(block.sizes) == 0] = float("nan")"""), look="1r-local/cold_rank/*"),
    bug("last_group_skipped", "the weight gradient leaves out the last group",
        Edit(VALUES, WRITTEN, """\
group_R = torch.arange(groups.start, groups.stop).repeat_interleave(torch.tensor(block.sizes))
            rows = rows.masked_fill((group_R == self.offsets_e.shape[0] - 2)[:, None], 0)
            """ + WRITTEN)),
    bug("wgrad_overwritten",
        "weight gradients of an expert's blocks overwrite each other instead of adding up (TE#3019)",
        Edit(VALUES, WRITTEN, """\
rows, first = rows.clone(), len(rows) // 2
            rows[:first] = 0
            """ + WRITTEN)),
    bug("backward_without_weight", "the backward of the combine leaves out the routing weight",
        Edit("experts.passes:backward", "up, down, _ = p.begin()", """\
up, down, _ = p.begin()
    p.w_R1.fill_(1)""")),
    bug("experts_in_bf16", "experts are cast to bfloat16 in a float32 model (torchtitan, by backend)",
        Edit("kernels.torch_mm:TorchBackend.compute_dtype", "return dtype", "return torch.bfloat16")),
    bug("sum_in_bf16", "a token's experts are summed in bfloat16 (torchtitan, by backend)",
        Edit(COMBINE, "each = None if weights_n is None else weights_n[csr.indices]", """\
dtype, rows_nD = rows_nD.dtype, rows_nD.bfloat16()
    each = None if weights_n is None else weights_n[csr.indices].bfloat16()"""),
        Edit(COMBINE, ".detach()", ".detach().to(dtype)")),
    bug("rows_summed_not_slots", "combine sums rows instead of slots: an expert chosen twice counts once",
        Edit(PLAN, "ids_MK = wide_ids(ids_MK)", """\
ids_MK = wide_ids(ids_MK)
    ids_MK = ids_MK.masked_fill((ids_MK[:, :, None] == ids_MK[:, None, :]).tril(-1).any(-1), -1)"""),
        look="1r-local/duplicates/*"),
    bug("compiled_offsets_off_by_one", "the last row of each expert's segment goes through the next expert",
        Edit(CPU_FIELDS, '"offsets": plan.offsets_e, "x"', """\
"offsets": torch.cat((plan.offsets_e[:1], (plan.offsets_e[1:-1] - 1).clamp(min=0), plan.offsets_e[-1:])), "x\""""),
        look=RANDOM),
    bug("compiled_slots_of_others",
        "the backward takes each row's weight, and puts its gradient, at another row's slot",
        Edit(CPU_BACKWARD, RUN, 'kernels.backward(fields | {"slot_R": fields["slot_R"].roll(1)})'), look=RANDOM),
    bug("compiled_rows_of_others", "the backward gathers another token's row of dy",
        Edit(CPU_BACKWARD, RUN, 'kernels.backward(fields | {"row_R": fields["row_R"].roll(1)})'), look=RANDOM),
    bug("compiled_pre_of_last_call",
        "pre-activations kept with the kernels, not with the call: a second layer overwrites the first one's",
        Edit(CPU_FORWARD, "return y, pre", """\
if pre is not None:
        globals().setdefault("_KEPT", {})[pre.shape, pre.dtype] = pre.clone()
    return y, pre"""),
        Edit(CPU_BACKWARD, '"pre": pre.contiguous()', '"pre": _KEPT[pre.shape, pre.dtype]'),
        look="1r-local/alternating/float32"),
    bug("compiled_wgrad_onto_garbage", "weight gradients are added to memory that nobody has written",
        Edit("experts.on_cpu:_written", 'fields |= {f"d_{name}": target, f"type', """\
if not adds:
                target.fill_(float("nan"))
            fields |= {f"d_{name}": target, f"type"""),
        Edit("experts.on_cpu:_written", "int(adds)}", "1}"), look=RANDOM),
    bug("compiled_empty_expert_unwritten",
        "the gradient of `up` of an expert without rows is never written (pytorch#172439)",
        Edit(CPU_BACKWARD, RUN, RUN + """
    if fields.get("d_up") is not None:
        fields["d_up"][fields["offsets"].diff() == 0] = float("nan")"""), look="1r-local/cold_rank/float32"),
    bug("compiled_ends_of_rows", "a vector loop leaves out the last columns of rows whose width it does not divide",
        Edit(CPU_FORWARD, "return y, pre", """\
y[:, y.shape[1] // 8 * 8 :] = 0
    return y, pre"""), look="1r-local/zipf2/float32"),
)
