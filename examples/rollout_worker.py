"""What samples for grpo_replay.py, in bfloat16, and says which experts it used; it stands where vLLM would.

Asked and answered over a pipe: (weights, prompts, most new tokens, seed), then a sample for each prompt.

Legend: B sequences, L positions, V vocabulary, K experts per token.
"""

import sys
from multiprocessing.connection import Connection

import torch
from transformers import AutoModelForCausalLM

import trimtab


@torch.no_grad()
def sample(model, prompts, length):
    """For each prompt (token ids) what vLLM would return: token ids, their log-probabilities, routed_experts."""
    longest = max(map(len, prompts))
    stop = model.config.eos_token_id
    ids_BL = torch.tensor([[stop] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask_BL = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with trimtab.record(model) as recording:
        out = model.generate(
            ids_BL, attention_mask=mask_BL, max_new_tokens=length, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            pad_token_id=stop, use_cache=True, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    parts = [recording.decisions(forward) for forward in range(len(out.logits))]  # the prompt, then token by token
    decisions = trimtab.Decisions.join(parts)
    new_BL = out.sequences[:, longest:]
    logps_BLV = torch.stack(out.logits, dim=1).float().log_softmax(-1)
    logps_BL = logps_BLV.gather(-1, new_BL[..., None]).squeeze(-1)
    answers = []
    for b, prompt in enumerate(prompts):
        ends = (new_BL[b] == stop).nonzero()
        count = int(ends[0]) + 1 if len(ends) else new_BL.shape[1]
        ran = slice(longest - len(prompt), longest + count - 1)  # not the last token: it was sampled, and never ran
        answers.append(
            {
                "completion_ids": new_BL[b, :count].tolist(),
                "logprobs": logps_BL[b, :count].tolist(),
                "routed_experts": decisions.ids[b, ran].to(torch.int16).numpy(),  # [tokens - 1, layers, K]
            }
        )
    return answers


def serve(pipe):
    """Answer until the trainer is gone."""
    while True:
        try:
            weights, prompts, length, seed = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, output_router_logits=False).eval()
        pipe.send(sample(model, prompts, length))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
