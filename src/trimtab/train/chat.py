"""Chat fine-tuning: what the assistant is to say is learnt, in the context that it will have then, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trimtab.errors import InputError
from trimtab.train.answers import Answer, Conversation

IGNORED = -100
"""The label of a token that carries no loss."""

FLAGS = ("weight", "loss_mask", "train", "trainable")
"""Keys of a message that say whether it is learnt (1, true) or not (0, false)."""

Piece = tuple[list[int], list[int]]
"""Token ids and labels of equal length. A label is IGNORED or what is to be said there: the id that stands there, or
the token that ends a turn, where the template has something else between an earlier answer and what follows."""


def encode_chat(tokenizer: Any, messages: Any, place: str, tools: Any = None) -> Iterator[Piece]:
    """Tokenize one conversation and label the answers: each once, with the token that ends its turn.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: `role` and `content`, strings, of each, and one of FLAGS where an answer is not to be learnt.
        place: where the conversation lies, for messages.
        tools: a list of the tools that the assistant may call, for the template, or None.

    Yields one piece, or one for each context if the template rewrites earlier turns; none without an answer to learn.

    Raises:
        InputError: no template, one that refuses the messages or renders one as nothing, or a flag of another value.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{place}: `messages` need a chat template, and the model's tokenizer has none")
    turns = [i for i, message in enumerate(messages) if _is_learnt(message, f"{place}: message {i + 1}")]
    if not turns:
        return
    plain = [{key: value for key, value in message.items() if key not in FLAGS} for message in messages]
    conversation = Conversation(tokenizer, plain, tools, place)
    for chain in conversation.chains(turns):
        yield _label(conversation, chain)


def _is_learnt(message: dict[str, Any], place: str) -> bool:
    flags = {key: message[key] for key in FLAGS if message.get(key) is not None}
    if wrong := {key: value for key, value in flags.items() if value not in (0, 1)}:
        raise InputError(f"{place}: {json.dumps(wrong)}: a message is learnt (1, true) or not (0, false)")
    return message["role"] == "assistant" and all(flags.values())


def _label(conversation: Conversation, chain: list[Answer]) -> Piece:
    """Ids of the last answer's text, up to the end of that answer, labelled where one of the chain lies."""
    text, tokenizer = chain[-1].text, conversation.tokenizer
    spans: list[tuple[int, int, str]] = []  # beginning, end, and what is learnt there in the place of what follows
    for answer in chain:
        after = conversation.special.match(text, answer.end)
        if after and (after[1] == answer.stop or (not answer.stop and not conversation.is_answered(answer.turn))):
            spans.append((answer.start, after.end(), ""))  # what opens the next turn may be what ends this one
        else:
            spans.append((answer.start, answer.end, answer.stop or _end_of_text(conversation)))
    ids, begins, ends = _tokens(tokenizer, text[: spans[-1][1]], [border for span in spans for border in span[:2]])
    labels = [IGNORED] * len(ids)
    at = 0
    for start, end, stop in spans:
        while at < len(ids) and ends[at] <= start:
            at += 1
        while at < len(ids) and begins[at] < end:  # a token across the beginning is the answer's
            labels[at] = ids[at]
            at += 1
        if stop and at < len(ids):
            labels[at] = tokenizer.convert_tokens_to_ids(stop)
        elif stop:
            ids.append(tokenizer.convert_tokens_to_ids(stop))
            labels.append(ids[-1])
    return ids, labels


def _end_of_text(conversation: Conversation) -> str:
    if conversation.tokenizer.eos_token is None:
        raise InputError(
            f"{conversation.place}: the chat template ends no answer, and the model's tokenizer has no EOS token for it"
        )
    return str(conversation.tokenizer.eos_token)


def _tokens(tokenizer: Any, text: str, borders: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Ids of `text`, and where each begins and ends in it, at least between which of the borders."""
    if tokenizer.is_fast:
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins, ends = zip(*made["offset_mapping"], strict=True)
        return list(made["input_ids"]), list(begins), list(ends)
    ids: list[int] = []
    begun: list[int] = []
    ended: list[int] = []
    for start, end in zip([0, *borders], borders, strict=False):
        some = tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
        ids += some
        begun += [start] * len(some)
        ended += [end] * len(some)
    return ids, begun, ended
