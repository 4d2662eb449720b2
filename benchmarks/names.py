"""Names that the command line offers without importing torch."""

WORKLOADS = ("balanced", "random", "zipf", "hot", "zero_expert_rank", "source_ragged")
"""What each is: `benchmarks.workloads`."""

AUTOCAST = "autocast"
"""In place of a dtype: parameters and tokens in float32, the forward under `torch.autocast` to bfloat16."""
