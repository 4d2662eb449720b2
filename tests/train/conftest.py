"""A tiny checkpoint and a little text."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def signals_heard() -> Iterator[None]:
    """As where a terminal starts the tests: a job in the background ignores SIGINT, one under nohup SIGHUP."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    for number, handler in before.items():
        if handler is not None:  # else it was none of Python's
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of two layers and four experts with the byte tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from trimtab.train.presets import byte_tokenizer

    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, eos_token_id=256,
        initializer_range=0.1, output_router_logits=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("checkpoint")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few short text files."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"File {i}. " + "The quick brown fox jumps over the lazy dog. " * (i + 3))
    return folder
