"""What stands before the lines of a reproduction, by peer: imports, and one small layer."""

from __future__ import annotations

TRANSFORMERS = """
import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

def block(experts):
    config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    config._experts_implementation = experts
    return Qwen3MoeSparseMoeBlock(config)
"""

PEFT = (
    TRANSFORMERS
    + """
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import apply_expert_parallelism

def model(experts):
    return nn.ModuleDict({"mlp": block(experts)})

def adapted(model):
    names = ["experts.gate_up_proj", "experts.down_proj"]
    inject_adapter_in_model(LoraConfig(r=4, target_modules=[], target_parameters=names), model)
    return model["mlp"]

def laid_out(model):
    experts, mesh = "mlp.experts", init_device_mesh("cpu", (1, world), mesh_dim_names=("tp", "ep"))
    plan = {f"{experts}.gate_up_proj": "grouped_gemm", f"{experts}.down_proj": "grouped_gemm"}
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan | {experts: "ep_dispatch_experts"}, "all_to_all")
    return model
"""
)

LLEP = """
import torch
import torch.distributed as dist
from llep.gpt_oss_llep import gptoss_llep_forward

def experts(tokens, group, expert=None):
    e, k, d, f = 4, 2, 16, 8
    ids = torch.full((tokens, k), expert) if expert is not None else torch.randint(e, (tokens, k))
    mine = e // group.size()
    up, up_bias, down, down_bias = (torch.randn(mine, *s) for s in ((d, 2 * f), (2 * f,), (f, d), (d,)))
    return gptoss_llep_forward(torch.randn(1, tokens, d), ids, torch.rand(tokens, e), up, up_bias, down, down_bias,
                               e, mine, group, min_tokens_per_gemm=1)
"""

MEGATRON = """
import contextlib
import torch
import torch.nn.functional as F
from helpers.megatron_cpu import built, cuda_stood_in, model_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

around = contextlib.ExitStack()

def moe_layer(ep=2, etp=1, router="megatron", **options):
    '''A MoELayer: 4 experts, K = 2, SequentialMLP. With ours: trimtab in it.'''
    around.enter_context(cuda_stood_in())
    around.enter_context(model_parallel(tp=1, ep=ep, etp=etp))
    if ours:
        options = {**options, "moe_token_dispatcher_type": "alltoall"}
    plain = dict(num_layers=1, hidden_size=16, ffn_hidden_size=8, num_attention_heads=1, num_moe_experts=4,
                 moe_router_topk=2, moe_ffn_hidden_size=8, moe_router_load_balancing_type="none",
                 moe_token_dispatcher_type="alltoall", add_bias_linear=False, gated_linear_unit=True,
                 activation_func=F.silu, use_cpu_initialization=True, expert_model_parallel_size=ep,
                 expert_tensor_parallel_size=etp)
    config = TransformerConfig(**plain | options)
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    if ours:
        from trimtab.integrations.megatron import use
        spec = use(spec, router=router)
    layer = built(spec.submodules.mlp, config=config)
    layer.set_layer_number(1)
    return layer.train()

def step(layer, x, wanted=True, **options):
    '''Forward and backward; the router's gradient.'''
    x.requires_grad_(wanted)
    y, _ = layer(x, **options)
    if y.requires_grad:
        y.sum().backward()
    return layer.router.weight.grad

def no_view():
    '''The one line of the router that can't take no tokens, repaired.'''
    view = torch.Tensor.view
    def repaired(self, *shape):
        return view(self, *((*shape[:-1], self.shape[-1]) if self.numel() == 0 and shape[-1:] == (-1,) else shape))
    torch.Tensor.view = repaired

def says_finite(grad):
    return f"router's gradient {'finite' if grad is None or bool(grad.isfinite().all()) else 'NaN'}"

def logged(loss):
    from megatron.core.transformer.moe import moe_utils
    found = moe_utils.get_moe_layer_wise_logging_tracker().get(loss)
    return f"logged {'nothing' if found is None else 'finite' if bool(found['values'].isfinite().all()) else 'NaN'}"

def fewer(router, args, output):
    '''A router that gives every other token one expert, not K.'''
    probs, chosen = output
    keep = chosen & ~((torch.arange(len(chosen)) % 2 == 0)[:, None] & (chosen.cumsum(1) > 1))
    return probs * keep, keep
"""

PRELUDES = {"transformers": TRANSFORMERS, "peft": PEFT, "llep": LLEP, "megatron": MEGATRON}
