"""Names that the command line offers without importing torch."""

WORKLOADS = ("balanced", "random", "zipf", "hot", "zero_expert_rank", "source_ragged")
"""What each is: `trimtab.bench.workloads`."""
