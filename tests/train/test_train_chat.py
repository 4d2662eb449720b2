"""What the assistant is to say is learned, token for token, with the templates that TRL ships and a few odd ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trimtab.errors import InputError
from trimtab.train.assistant_spans import IGNORED, Piece, _common, encode_chat
from trimtab.train.messages import REASONING
from trimtab.train.presets import byte_tokenizer

SHIPPED = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = sorted(
    path.stem for path in SHIPPED.glob("*.jinja")
    if not path.stem.endswith("_training")
    and path.stem not in ("idefics3", "llava_next", "smolvlm")  # which take nothing but lists of parts
)  # fmt: skip
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>", "diffusion": "<turn|>",
    "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>", "gemma4": "<turn|>", "glm4moe": "<|endoftext|>",
    "gptoss": "<|return|>", "lfm2": "<|im_end|>", "llama3": "<|eot_id|>",
    "muse": "<|eot|>", "nemotron": "<|im_end|>", "phi3": "<|end|>", "qwen": "<|im_end|>",
}  # fmt: skip
"""The token that ends an answer, by the beginning of a template's name."""
TOKEN = re.compile(
    r"<[|\uff5c][^<>\s'\"{}]*?[|\uff5c]>|</?s>|<(?:start|end)_of_(?:turn|utterance)>|<\|?[a-z_]+\|>|<\|[a-z_]+>"
)
NOT_SPECIAL = re.compile(r"think|tool|arg_|function|response|param|channel>|sep")
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "adder", "arguments": {"v": 1}}}
VALUES = {"type": "object", "properties": {"v": {"type": "integer", "description": "n"}}, "required": ["v"]}
TOOLS = [{"type": "function", "function": {"name": "adder", "description": "adds", "parameters": VALUES}}]


def user(words: Any) -> dict[str, Any]:
    return {"role": "user", "content": words}


def said(words: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words, **more}


def result(words: str) -> dict[str, Any]:
    return {"role": "tool", "name": "adder", "tool_call_id": "abcdefghi", "content": words}


SYSTEM = {"role": "system", "content": "System"}
ONE, TWO = [user("Uone"), said("Aone")], [user("Utwo"), said("Atwo")]
KINDS = {
    "one": ONE,
    "with a system": [SYSTEM, *ONE],
    "two": [*ONE, *TWO],
    "three": [SYSTEM, *ONE, *TWO, user("Uthree"), said("Athree")],
    "ends with the user": [*ONE, user("Utwo")],
    "assistant first": [said("Azero"), *ONE],
    "assistant first after a system": [SYSTEM, said("Azero"), *ONE],
    "assistants in a row": [*ONE, said("Amore"), *TWO],
    "users in a row": [user("Uzero"), *ONE],
    "thoughts": [
        user("Uone"), said("<think>\nRone\n</think>\n\nAone"), user("Utwo"), said("<think>\nRtwo\n</think>\n\nAtwo"),
    ],
    "reasoning": [
        user("Uone"), said("Aone", reasoning_content="Rone"), user("Utwo"), said("Atwo", reasoning_content="Rtwo"),
    ],
    "reasoning by another key": [
        user("Uone"), said("Aone", reasoning="Rone"), user("Utwo"), said("Atwo", thinking="Rtwo"),
    ],
    "call": [user("Uone"), said("", tool_calls=[CALL]), result("Tone"), said("Aone"), *TWO],
    "calls": [user("Uone"), said("", tool_calls=[CALL, CALL]), result("Tone"), result("Ttwo"), said("Aone")],
    "weights": [user("Uone"), said("Zone", weight=0), *TWO],
    "flags": [
        *ONE, user("Utwo"), said("Ztwo", train=False), user("Uthree"), said("Athree", loss_mask=1, trainable=True),
    ],
    "other flags": [
        user("Uone"), said("Zone", loss=False), user("Utwo"), said("Ztwo", masked=True, loss=1), user("Uthree"),
        said("Athree", loss=True, masked=0, loss_weight=1.0, training=True),
    ],
}  # fmt: skip


def end_of(name: str) -> str:
    return ENDS[max((start for start in ENDS if name.startswith(start)), key=len)]


def shipped(name: str) -> Any:
    """A tokenizer of bytes and a template's own special tokens."""
    template = (SHIPPED / f"{name}.jinja").read_text(encoding="utf-8")
    names = sorted({*TOKEN.findall(template), end_of(name), "<|bos|>"})
    alphabet = {char: byte for byte, char in bytes_to_unicode().items()}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([n for n in names if not NOT_SPECIAL.search(n)])
    core.add_tokens([n for n in names if NOT_SPECIAL.search(n)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token=end_of(name), clean_up_tokenization_spaces=False,
        chat_template=template,
    )  # fmt: skip


def tokenizer(template: str) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    return made


def runs(tok: Any, piece: Piece) -> list[tuple[str, str]]:
    """The runs of labeled tokens: the text before each, and what is learned there."""
    ids, labels, length = piece
    assert len(ids) == len(labels) == length
    borders = [
        i for i in range(len(ids) + 1) if (i and labels[i - 1] != IGNORED) != (i < len(ids) and labels[i] != IGNORED)
    ]
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return [(tok.decode(ids[:start]), tok.decode(labels[start:end])) for start, end in pairs]


def learned(tok: Any, messages: Any, tools: Any = None) -> list[str]:
    return [run for piece in encode_chat(tok, messages, "here", tools) for _, run in runs(tok, piece)]


def rendered(tok: Any, messages: Any, *, prompt: bool = False, tools: Any = None) -> str | None:
    try:
        return tok.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    except Exception:
        return None


def answer_words(message: dict[str, Any]) -> list[str]:
    reasoning = next((message[key] for key in REASONING if key in message), "")
    return re.findall("[AR][a-z]+", f"{reasoning} {message['content']}")


def has_a_place(tok: Any, messages: Any, turn: int) -> bool:
    """True where the template renders the reasoning of an answer under one of its keys, or asks for it itself."""
    some = messages[: turn + 1]
    before = rendered(tok, some[:-1], prompt=True) or ""
    (words,) = (some[-1][key] for key in REASONING if key in some[-1])
    with_keys = ({**{k: v for k, v in some[-1].items() if k not in REASONING}, key: words} for key in REASONING)
    texts = [rendered(tok, [*some[:-1], message]) or "" for message in with_keys]
    asked = before.rstrip().endswith("<think>") and not any(text.startswith(before) for text in texts)
    return asked or any(words in text for text in texts)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_is_learned_once_with_its_end_and_nobody_else(name: str) -> None:
    tok, trained = shipped(name), 0
    for kind, messages in KINDS.items():
        tools = TOOLS if kind.startswith("call") else None
        whole = rendered(tok, messages, tools=tools)
        answers = [
            i for i, m in enumerate(messages) if m["role"] == "assistant" and not str(m["content"]).startswith("Z")
        ]
        called = [i for i in answers if messages[i].get("tool_calls")]
        nothing = whole is not None and (
            whole.count("adder") < 2 * len(called)
            or any(w not in whole for i in answers for w in answer_words(messages[i])[-1:])
            or any(not has_a_place(tok, messages, i) for i in answers if any(key in messages[i] for key in REASONING))
        )
        if whole is None or nothing:
            with pytest.raises(InputError, match=r"refused|renders"):
                learned(tok, messages, tools)
            continue
        trained += 1
        found = [run for piece in encode_chat(tok, messages, "here", tools) for run in runs(tok, piece)]
        everything = "".join(run for _, run in found)
        for word in (word for i in answers for word in answer_words(messages[i])):
            assert everything.count(word) == 1, (kind, word, found)
        for word in ("System", "Uzero", "Uone", "Utwo", "Uthree", "Tone", "Ttwo", "Zone", "Ztwo"):
            assert word not in everything, (kind, word, found)
        ends = everything.count(end_of(name)) + everything.count("<|user|>") + everything.count("<|observation|>")
        assert ends + everything.count("<|call|>") >= len(answers) - (kind == "assistants in a row"), (kind, found)
        for turn in answers:  # the truth: what stands before the model when it is to answer, and what the template adds
            before = rendered(tok, messages[:turn], prompt=True, tools=tools)
            after = rendered(tok, messages[: turn + 1], tools=tools)
            if before and after and after.startswith(before) and kind not in ("assistants in a row", "thoughts"):
                answer = re.sub(rf"\s*({re.escape(end_of(name))})?\s*$", "", after[len(before) :])
                context, run = next(pair for pair in found if answer in pair[1] and pair[0].endswith(before))
                assert run.startswith(answer), (kind, context, run)
    assert trained, "the template renders nothing"


def test_a_template_that_writes_another_end_into_history_has_its_own_end_learned() -> None:
    tok = shipped("gptoss")
    ((ids, labels, _),) = encode_chat(tok, KINDS["two"], "here")
    other = [
        (tok.decode([i]), tok.decode([label]))
        for i, label in zip(ids, labels, strict=True) if label not in (i, IGNORED)
    ]  # fmt: skip
    assert other == [("<|end|>", "<|return|>")], "one piece, and the end of its first answer is the true one"


def test_reasoning_is_learned_under_each_of_its_keys_or_refused() -> None:
    for name in ("qwen3", "deepseek_r1_distill", "gptoss"):
        tok = shipped(name)
        runs_of = [learned(tok, [user("Uone"), said("Aone", **{key: " Rone\n"})]) for key in REASONING]
        assert "Rone" in runs_of[0][0]
        assert runs_of[0] == runs_of[1] == runs_of[2], name
    for more in ({"thinking": "Rone"}, {"reasoning": "Rone", "train": True}):
        with pytest.raises(InputError, match=r"message 2 .* its reasoning as nothing; leave that out"):
            learned(shipped("llama3"), [user("Uone"), said("Aone", **more)])
    assert learned(shipped("llama3"), [user("Uone"), said("Zone", thinking="Rone", loss=0), *TWO]) == ["Atwo<|eot_id|>"]
    with pytest.raises(InputError, match=r"message 2: its reasoning .* is not the same"):
        learned(shipped("qwen3"), [user("Uone"), said("Aone", thinking="Rone", reasoning="Rtwo")])


def test_reasoning_of_others_than_the_assistant_is_no_reasoning() -> None:
    tok = shipped("qwen3")
    for value in (True, ["a"], "Rone"):
        asked = {**user("Uone"), "thinking": value, "reasoning": "Rtwo"}
        assert learned(tok, [asked, said("Aone")]) == learned(tok, ONE)
        assert list(encode_chat(tok, [asked, said("Aone")], "here")) == list(encode_chat(tok, ONE, "here"))


@given(st.text("ab"), st.text("ab"), st.text("ab"))
def test_the_common_beginning_is_that_of_every_character(start: str, one: str, other: str) -> None:
    assert _common(start + one, start + other) == max(
        n for n in range(len(start + one) + 1) if (start + other).startswith((start + one)[:n])
    )


def test_a_template_that_rewrites_history_gives_a_piece_for_each_context() -> None:
    tok = shipped("qwen3")
    first, second = encode_chat(tok, KINDS["thoughts"], "here")
    assert [run for _, run in runs(tok, first)] == ["<think>\nRone\n</think>\n\nAone<|im_end|>"]
    ((before, run),) = runs(tok, second)
    assert run == "<think>\nRtwo\n</think>\n\nAtwo<|im_end|>"
    assert before == rendered(tok, KINDS["thoughts"][:3], prompt=True)
    assert "Rone" not in before


def test_reasoning_that_the_prompt_opens_is_closed_though_the_template_renders_none() -> None:
    tok = shipped("deepseek_r1_distill")
    ((before, run),) = runs(tok, next(encode_chat(tok, KINDS["thoughts"][:2], "here")))
    assert before == rendered(tok, KINDS["thoughts"][:1], prompt=True)
    assert before.endswith("<think>\n")
    assert run == f"Rone\n</think>\n\nAone{end_of('deepseek')}"
    assert learned(tok, KINDS["reasoning"][:2]) == [run]
    assert learned(tok, ONE) == [f"\n</think>\n\nAone{end_of('deepseek')}"]


def test_a_long_conversation_is_tokenized_once() -> None:
    class Counting(PreTrainedTokenizerFast):
        seen = 0

        def __call__(self, text: str, **options: Any) -> Any:
            Counting.seen += len(text)
            return super().__call__(text, **options)

    tok = Counting(tokenizer_object=shipped("llama3").backend_tokenizer, eos_token="<|eot_id|>", bos_token="<|bos|>")
    tok.chat_template = shipped("llama3").chat_template
    messages = [m for i in range(75) for m in (user(f"U{i} " * 20), said(f"A{i} " * 20))]
    ((ids, _, _),) = encode_chat(tok, messages, "here")
    assert Counting.seen <= len(tok.decode(ids))


def test_marks_of_the_tokenizers_own_template_are_obeyed() -> None:
    marked = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}quietly: {% generation %}"
        "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    )
    tok = tokenizer(marked)
    assert learned(tok, KINDS["two"]) == ["Aone<|end|>", "Atwo<|end|>"], "the end is learned though it lies outside"
    assert learned(tok, KINDS["weights"]) == ["Atwo<|end|>"]
    tok.chat_template = marked.replace(
        "{{ m['content'] }}{% endgeneration %}", "{% endgeneration %}{% generation %}{% endgeneration %}", 1
    )
    with pytest.raises(InputError, match="marks 2 spans of it as generated"):
        learned(tok, KINDS["weights"])


def test_where_no_turn_is_ended_the_end_of_text_is_learned_there() -> None:
    tok = tokenizer(
        "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:{% endif %}"
    )
    ((ids, labels, _),) = encode_chat(tok, KINDS["two"], "here")
    assert [run for _, run in runs(tok, (ids, labels, len(ids)))] == [" Aone<|eos|>", " Atwo<|eos|>"]
    assert tok.decode(ids) == rendered(tok, KINDS["two"]).rstrip() + "<|eos|>", "the first one's end is a label alone"


def test_the_template_is_told_of_tools_and_calls_are_learned() -> None:
    tok = byte_tokenizer()
    assert learned(tok, [user("Uone"), said("Zone", weight=0), user("Utwo")]) == []
    messages = [user("one two"), said("", tool_calls=[CALL])]
    ((before, answer),) = runs(tok, next(encode_chat(tok, messages, "here", TOOLS)))
    assert before == f"<|start|>tools\n{json.dumps(TOOLS)}<|end|>\n<|start|>user\none two<|end|>\n<|start|>assistant\n"
    assert json.loads(answer.removesuffix("<|end|>")) == [CALL]


def test_a_token_across_the_border_and_tokenizers_without_offsets() -> None:
    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, ":": 2, ":y": 3, "y": 4, ";": 5}, merges=[(":", "y")]))
    template = (
        "{% for m in messages %}{{ 'a' if m['role'] == 'assistant' else 'b' }}:{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tok = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=";", chat_template=template)
    ((ids, labels, _),) = encode_chat(tok, [user("b"), said("yb")], "here")
    assert tok.convert_ids_to_tokens(ids) == ["b", ":", "b", ";", "a", ":y", "b", ";"]
    assert [label != IGNORED for label in labels] == [False] * 5 + [True] * 3, "the token across it is the answer's"
    slow = ByT5Tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")
    assert learned(slow, KINDS["two"]) == ["Aone</s>", "Atwo</s>"]


def test_a_role_that_the_template_names_is_one() -> None:
    tok = byte_tokenizer()
    tok.chat_template = tok.chat_template.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message['role'] == 'critic' %}!{% endif %}",
        1,
    )
    assert learned(tok, [user("x"), {"role": "critic", "content": "z"}, said("y")]) == ["y<|end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("", KINDS["one"], "need a chat template, and the model's tokenizer has none"),
        ("{{ raise_exception('roles must alternate') }}", KINDS["one"], "refused the messages: roles must alternate"),
        (None, [user("x"), said("y", weight=0.5)], 'message 2: {"weight": 0.5}: a message is learned (1, true) or not'),
        (
            "{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}", KINDS["one"],
            "message 1 (user): the chat ",
        ),
        (None, [user("x"), {"role": "asistant", "content": "y"}], "message 2 has the role `asistant`; roles are sys"),
        (None, [{"role": "critic", "content": "x"}, user("x"), said("y")], "message 1 has the role `critic`"),
    ],
)  # fmt: skip
def test_refusals_name_the_place(template: str | None, messages: Any, reason: str) -> None:
    tok = byte_tokenizer() if template is None else tokenizer(template)
    with pytest.raises(InputError, match=r"^chat\.jsonl:7: ") as error:
        list(encode_chat(tok, messages, "chat.jsonl:7"))
    assert reason in str(error.value)
