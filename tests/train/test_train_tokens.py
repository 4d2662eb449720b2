"""The byte tokenizer: one token per byte, there and back, and a standard file format."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trimtab.train.presets import SPECIALS, byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text().filter(lambda text: not any(special in text for special in SPECIALS)))
def test_a_token_is_a_byte(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_auto_tokenizer_opens_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened("ab<|end|>é")["input_ids"] == [97, 98, 258, 0xC3, 0xA9]
    assert opened.eos_token_id == 256
    assert opened.chat_template == TOKENIZER.chat_template
    assert "trimtab" not in "".join(path.read_text() for path in tmp_path.iterdir())
