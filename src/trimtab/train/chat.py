"""Chat fine-tuning: only what the assistant says is learnt.

The tokenizer's own chat template is rendered up to each assistant turn and past it; what the second adds to the
first is that turn's answer. Tokens are compared the same way, so no `{% generation %}` marker is needed and the
prompt is tokenised as it will be when the model is used. A template that rewrites earlier turns (as those that
drop old reasoning do) gives one document per assistant turn instead of one per conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trimtab.errors import InputError

IGNORED = -100
"""The label of a token that carries no loss."""

ANSWER = "<<answer>>"
"""Stands where an answer does, in a conversation that is rendered to see where that is."""

Piece = tuple[list[int], list[int]]
"""Token ids and labels of equal length; a label is the id itself or IGNORED."""


def encode_chat(tokenizer: Any, messages: Any, place: str, tools: Any = None) -> Iterator[Piece]:
    """Tokenise one conversation and label the assistant's tokens.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: a list of `{"role": …, "content": …}`.
        place: where the conversation lies, for messages.
        tools: a list of the tools that the assistant may call, for the template, or None.

    Yields one piece, or one per assistant turn if the template rewrites earlier turns; none without an assistant
    turn. Raises InputError for malformed messages, a tokenizer without a template, and a template whose rendering
    up to an assistant turn does not begin its rendering past that turn.
    """
    check_chat(tokenizer, messages, tools, place)

    def render(some: list[Any], *, prompt: bool) -> str:
        return _render(tokenizer, some, tools, place, prompt=prompt)

    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for turn in turns:
        answered = render(messages[: turn + 1], prompt=False)
        prompt = render(messages[:turn], prompt=True) if turn else _before_all(answered, render)
        if not answered.startswith(prompt):
            raise InputError(
                f"{place}: the chat template is not prefix-stable: the prompt of turn {turn + 1} is not the "
                "beginning of the answered conversation, so the assistant's tokens cannot be told apart"
            )
        spans.append((prompt, answered))
    if not spans:
        return
    whole = render(messages, prompt=False)
    texts = [text for span in spans for text in span] + [whole]
    if all(after.startswith(before) for before, after in zip(texts, texts[1:], strict=False)):
        yield _label(tokenizer, whole, spans)
    else:
        for prompt, answered in spans:
            yield _label(tokenizer, answered, [(prompt, answered)])


def check_chat(tokenizer: Any, messages: Any, tools: Any, place: str) -> None:
    """Raise InputError for what is no conversation, or where there is no template for one."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise InputError(f"{place}: `messages` must be a list of objects with `role` and `content`")
    if not all(isinstance(m.get("content"), (str, list, type(None))) for m in messages):
        raise InputError(f"{place}: the `content` of a message must be a string, or a list of its parts")
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"{place}: `tools` must be a list")
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{place}: `messages` need a chat template, and the model's tokenizer has none")


def _label(tokenizer: Any, whole: str, spans: list[tuple[str, str]]) -> Piece:
    """Ids of `whole`, labelled where a span's answered text goes beyond its prompt; both are prefixes of it."""
    ids = _ids(tokenizer, whole)
    labels = [IGNORED] * len(ids)
    for prompt, answered in spans:
        # A token that straddles the border differs from the prompt's own last token: it counts as the answer's.
        start = _common(_ids(tokenizer, prompt), ids)
        end = len(ids) if answered == whole else _common(_ids(tokenizer, answered), ids)
        labels[start:end] = ids[start:end]
    return ids, labels


def _before_all(answered: str, render: Callable[..., str]) -> str:
    """What the template writes before an assistant who speaks first; many refuse to prompt for an answer to nothing."""
    other = render([{"role": "assistant", "content": ANSWER}], prompt=False)
    return answered[: _common(other.partition(ANSWER)[0], answered)] if ANSWER in other else ""


def _render(tokenizer: Any, messages: list[Any], tools: Any, place: str, *, prompt: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # the template is the user's program: whatever it raises is about their data
        raise InputError(f"{place}: the chat template refused the messages: {error}") from error
    return str(text).encode("utf-8", "replace").decode()


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _common(prefix: Sequence[Any], ids: Sequence[Any]) -> int:
    """Length of the longest common beginning."""
    for i, (a, b) in enumerate(zip(prefix, ids, strict=False)):
        if a != b:
            return i
    return min(len(prefix), len(ids))
