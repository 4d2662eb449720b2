"""Only the assistant's tokens carry a label, whatever the template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trimtab.errors import InputError
from trimtab.train.chat import IGNORED, encode_chat
from trimtab.train.tokens import byte_tokenizer

CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "U2"},
    {"role": "assistant", "content": "A2"},
]
# As the templates of reasoning models do: only the last answer keeps its (here empty) thoughts.
FORGETFUL = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
REVERSED = "{% for m in messages | reverse %}{{ m['content'] }}{% endfor %}"
FUSSY = "{{ raise_exception('roles must alternate') }}"


def tokenizer(template: str | None = None) -> Any:
    made = byte_tokenizer()
    if template is not None:
        made.chat_template = template
    return made


def learnt(tok: Any, labels: list[int]) -> list[str]:
    """The runs of labelled tokens, as text."""
    runs: list[list[int]] = [[]]
    for label in labels:
        if label == IGNORED:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tok.decode(run) for run in runs if run]


def test_answers_are_labelled_and_nothing_else() -> None:
    tok = tokenizer()
    ((ids, labels),) = encode_chat(tok, CHAT, "here")
    assert tok.decode(ids) == tok.apply_chat_template(CHAT, tokenize=False)
    assert learnt(tok, labels) == ["A1<|end|>\n", "A2<|end|>\n"]
    assert all(label in (IGNORED, i) for i, label in zip(ids, labels, strict=True))


def test_calls_parts_and_answers_without_words_are_not_lost() -> None:
    tok, call = tokenizer(), {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    ((ids, labels),) = encode_chat(tok, chat, "here", [{"name": "add"}])
    assert tok.decode(ids).startswith('<|start|>tools\n[{"name": "add"}]<|end|>\n<|start|>user\none two<|end|>\n')
    (answer,) = learnt(tok, labels)
    assert json.loads(answer.removesuffix("<|end|>\n")) == [call]
    chat[0]["content"] = [{"type": "image"}]
    with pytest.raises(InputError, match="refused the messages: this tokenizer takes parts of text alone"):
        list(encode_chat(tok, chat, "here"))


def test_conversation_that_ends_with_the_user() -> None:
    tok = tokenizer()
    ((_, labels),) = encode_chat(tok, CHAT[:4], "here")
    assert learnt(tok, labels) == ["A1<|end|>\n"]


TOOLS = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nHelp.<|end|>\n{% endif %}"
    "{% if tools %}<|start|>tools\n{{ tools[0]['name'] }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def test_an_assistant_who_speaks_first_is_not_learnt_with_the_template_s_words() -> None:
    tok = tokenizer(TOOLS)
    messages = [{"role": "assistant", "content": "Hello"}, *CHAT[1:3]]
    ((ids, labels),) = encode_chat(tok, messages, "here")
    assert tok.decode(ids).startswith("<|start|>system\nHelp.<|end|>\n<|start|>assistant\nHello<|end|>")
    assert learnt(tok, labels) == ["Hello<|end|>\n", "A1<|end|>\n"]


def test_the_template_is_told_of_tools() -> None:
    tok = tokenizer(TOOLS)
    ((ids, labels),) = encode_chat(tok, CHAT[:3], "here", [{"name": "search"}])
    assert "<|start|>tools\nsearch<|end|>" in tok.decode(ids)
    assert learnt(tok, labels) == ["A1<|end|>\n"]
    with pytest.raises(InputError, match=r"chat\.jsonl:7: `tools` must be a list"):
        list(encode_chat(tok, CHAT[:3], "chat.jsonl:7", "search"))


def test_no_answer_gives_nothing() -> None:
    assert list(encode_chat(tokenizer(), CHAT[:2], "here")) == []


def test_template_that_rewrites_earlier_turns_gives_one_document_per_answer() -> None:
    tok = tokenizer(FORGETFUL)
    first, second = encode_chat(tok, CHAT, "here")
    assert learnt(tok, first[1]) == ["<think></think>A1<|end|>\n"]
    assert learnt(tok, second[1]) == ["<think></think>A2<|end|>\n"]
    assert "U2" not in tok.decode(first[0])
    assert tok.decode(second[0]) == tok.apply_chat_template(CHAT, tokenize=False)


def test_token_across_the_border_belongs_to_the_answer() -> None:
    class Merging:
        """Joins `:` and the next character into one token."""

        chat_template = "x"

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            text = "".join(f"{m['role'][0]}:{m['content']};" for m in messages)
            return text + ("a:" if options["add_generation_prompt"] else "")

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            ids = []
            while text:
                n = 2 if text[0] == ":" and len(text) > 1 else 1
                ids.append(sum(ord(c) * 1000**i for i, c in enumerate(text[:n])))
                text = text[n:]
            return {"input_ids": ids}

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    ((ids, labels),) = encode_chat(Merging(), messages, "here")
    assert len(ids) == 8  # u :h i ; a :y o ;
    assert [label != IGNORED for label in labels] == [False] * 5 + [True] * 3


@pytest.mark.parametrize(
    ("tok", "messages", "reason"),
    [
        (tokenizer(""), CHAT, "none"),
        (tokenizer(REVERSED), CHAT, "prefix-stable"),
        (tokenizer(FUSSY), CHAT, "roles must alternate"),
        (tokenizer(), "hello", "list of objects"),
        (tokenizer(), [{"content": "x"}], "list of objects"),
    ],
)
def test_refusals_name_the_place(tok: Any, messages: Any, reason: str) -> None:
    with pytest.raises(InputError) as error:
        list(encode_chat(tok, messages, "chat.jsonl:7"))
    assert "chat.jsonl:7" in str(error.value)
    assert reason in str(error.value)
