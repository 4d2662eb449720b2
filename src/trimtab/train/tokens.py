"""A byte is a token: the tokenizer of the presets, saved as a standard one that needs no trimtab to open.

256 ids for the byte values (id = byte), then the special tokens. It is a BPE without merges over the byte
alphabet that `tokenizers` defines, so `AutoTokenizer.from_pretrained` reads it back anywhere.
"""

from __future__ import annotations

from typing import Any

EOS, START, END = "<|eos|>", "<|start|>", "<|end|>"
BYTE_VOCAB = 256
SPECIALS = (EOS, START, END)

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|start|>tools\\n' + (tools | tojson) + '<|end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}"
    "{% if part['type'] != 'text' %}{{ raise_exception('this tokenizer takes parts of text alone') }}{% endif %}"
    "{{ part['text'] }}"
    "{% endfor %}{% endif %}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte value 0..255 in byte-level tokenizers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(BYTE_VOCAB + i) for i in range(BYTE_VOCAB - len(printable)))
    shown = set(printable)
    return [chr(byte) if byte in shown else next(others) for byte in range(BYTE_VOCAB)]


def byte_tokenizer() -> Any:
    """Build the byte tokenizer: a `PreTrainedTokenizerFast` of 259 ids with EOS and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
