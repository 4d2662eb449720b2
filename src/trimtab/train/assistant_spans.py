"""Chat fine-tuning: the assistant's answers are learned, in the context that they will have, and nothing else.

For each answer the tokenizer's own chat template is rendered up to it, with the generation prompt, and past it: the
second adds the answer. TRL's marked templates keep old reasoning, after which a model never has to answer, and are not
put in the place of a tokenizer's own, whose marks are obeyed.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trimtab.errors import InputError
from trimtab.train.messages import LEARNED, MASKED, REASONING, check_roles
from trimtab.train.readers import tokens

IGNORED = -100
"""The label of a token that carries no loss."""
OTHER = "\u0394\u0394other words\u0394\u0394"
"""Stands in the place of a message's words, to see where the template puts them."""

Messages = list[dict[str, Any]]
Piece = tuple[Sequence[int], Sequence[int], int]
"""The first token ids and labels, and the number of all. A label is IGNORED or what is to be said there: the id that
stands there, or the token that ends a turn, where the template has something else behind an earlier answer."""


def first_of(labeled: Iterable[tuple[int, int]], most: int) -> Piece:
    """The piece of tokens and their labels of which memory holds `most`."""
    ids, labels, length = array("i"), array("i"), 0
    for length, (token, label) in enumerate(labeled, 1):
        if length <= most:
            ids.append(token)
            labels.append(label)
    return ids, labels, length


def encode_chat(
    tokenizer: Any, messages: Any, place: str, tools: Any = None, most: int = sys.maxsize
) -> Iterator[Piece]:
    """Tokenize one conversation and label the answers: each once, with the token that ends its turn.

    Yields one piece, or one for each context if the template rewrites earlier turns; none without an answer to learn.
    Raises InputError where there is no template, it refuses the messages or renders one as nothing, for a role that
    nobody names, or for a flag of another value.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{place}: `messages` need a chat template, and the model's tokenizer has none")
    check_roles(messages, str(tokenizer.chat_template), place)
    turns = [i for i, message in enumerate(messages) if _is_learned(message, f"{place}: message {i + 1}")]
    if not turns:
        return
    plain = [_plain(message, f"{place}: message {i + 1}") for i, message in enumerate(messages)]
    conversation = Conversation(tokenizer, plain, tools, place)
    for chain in conversation.chains(turns):
        yield first_of(_label(conversation, chain), most)


def _is_learned(message: dict[str, Any], place: str) -> bool:
    flags = {key: message[key] for key in (*LEARNED, *MASKED) if message.get(key) is not None}
    if wrong := {key: value for key, value in flags.items() if value not in (0, 1)}:
        raise InputError(f"{place}: {json.dumps(wrong)}: a message is learned (1, true) or not (0, false)")
    return message["role"] == "assistant" and all(bool(flags[key]) != (key in MASKED) for key in flags)


def _plain(message: dict[str, Any], place: str) -> dict[str, Any]:
    """A message as templates take it, which have its reasoning under one key or another."""
    said = {message.get(key, "").strip() for key in REASONING if message["role"] == "assistant"} - {""}
    if len(said) > 1:
        raise InputError(f"{place}: its reasoning under {' and '.join(REASONING)} is not the same")
    plain = {key: value for key, value in message.items() if key not in (*LEARNED, *MASKED, *REASONING)}
    return plain | {key: each for each in said for key in REASONING}


@dataclass(frozen=True)
class Answer:
    """The answer `text[start:end]` of a turn; `stop` is the token that ends it, empty where the template has none."""

    turn: int
    text: str
    start: int
    end: int
    stop: str


@dataclass(frozen=True)
class Conversation:
    """One conversation and its renderings: messages and tools as the template takes them, and its place."""

    tokenizer: Any
    messages: Messages
    tools: Any
    place: str

    def chains(self, turns: list[int]) -> Iterator[list[Answer]]:
        """Yield the answers of `turns`. Those of a chain lie in the text of its last one, which alone keeps it."""
        chain: list[Answer] = []
        for turn in turns:
            answer = self._answer(turn)
            if chain and answer.text.startswith(chain[-1].text[: chain[-1].end]):
                chain[-1] = replace(chain[-1], text="")  # a text for each turn would be turns times the conversation
            elif chain:
                yield chain
                chain = []
            chain.append(answer)
        for turn, message in enumerate(self.messages[: turns[-1]]):
            if message["role"] != "assistant" and message["content"].strip() not in chain[-1].text:
                self._check_rendered(turn, turns[-1] + 1)
        yield chain

    @cached_property
    def special(self) -> re.Pattern[str]:
        """One special token, with the white space before it."""
        tokens = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        tokens |= set(self.tokenizer.all_special_tokens)
        longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
        return re.compile(rf"\s*({'|'.join(longest_first) or '(?!)'})")

    @cached_property
    def has_marks(self) -> bool:
        """True where the template says itself what is generated."""
        template = self.tokenizer.chat_template
        return isinstance(template, str) and re.search(r"{%-?\s*generation\s*-?%}", template) is not None

    def _render(self, messages: Messages, *, prompt: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # the template is the user's program: whatever it raises is about their data
            raise InputError(f"{self.place}: the chat template refused the messages: {error}") from error
        return re.sub("[\ud800-\udfff]", "?", str(text))

    def _tried(self, messages: Messages, *, prompt: bool = False) -> str | None:
        """The text, or None where the template refuses, as many do what does not begin with a user."""
        try:
            return self._render(messages, prompt=prompt)
        except InputError:
            return None

    def _answer(self, turn: int) -> Answer:
        prompt = self._tried(self.messages[:turn], prompt=True)
        text = self._tried(self.messages[: turn + 1])
        if text is not None and self.has_marks:
            found = self._marked_answer(turn, text)
        elif text is not None and prompt is not None and text.startswith(prompt):
            found = self._without_stop(turn, text, len(prompt), len(text))
        else:
            found = self._answer_by_words(turn, prompt)
        found = self._with_thoughts(found, prompt)
        self._check_answer(found)
        return found

    def _without_stop(self, turn: int, text: str, start: int, end: int) -> Answer:
        said = text[start:end].rstrip()
        stop = next((m for m in self.special.finditer(said) if m.end() == len(said)), None)
        end = start + (len(said) if stop is None else stop.start(1))
        return Answer(turn, text, start, end, "" if stop is None else stop[1])

    def _answer_by_words(self, turn: int, prompt: str | None) -> Answer:
        """Find the answer by other words in its place, where the answered conversation does not begin with the prompt.

        The answer begins behind as much of what opens it as the template has left there.
        """
        some = self.messages[: turn + 1]
        text = self._tried(some)
        if text is None:
            some, text = self.messages, self._render(self.messages)
        other = self._render([*some[:turn], {"role": "assistant", "content": OTHER}, *some[turn + 1 :]])
        start = _common(text, other)
        behind = min(_common(text[::-1], other[::-1]), len(text) - start, len(other) - start)
        earlier = self._tried(self.messages[:turn])
        least = _common(earlier or "", text)
        opening = self._opening(earlier, prompt)
        token = self.special.search(opening)
        for size in range(len(opening), token.end() - 1 if token else 0, -1):
            if (at := text.rfind(opening[:size], least, start)) >= 0:
                start = at + size
                break
        end = len(text) - behind
        if stop := self.special.match(text, end):
            end = stop.end()
        return self._without_stop(turn, text, start, end)

    def _opening(self, earlier: str | None, prompt: str | None) -> str:
        """The text that the template adds where an answer is to come."""
        if prompt is None or earlier is None:
            user = [{"role": "user", "content": "x"}]
            prompt, earlier = self._tried(user, prompt=True) or "", self._tried(user) or ""
        return prompt[_common(earlier, prompt) :]

    def _with_thoughts(self, found: Answer, prompt: str | None) -> Answer:
        """The answer after a prompt that opens the reasoning, where the template has none in what it renders.

        The model is to close the reasoning then, which is empty where the message has none.
        """
        if prompt is None or found.text.startswith(prompt) or not prompt.rstrip().endswith("<think>"):
            return found
        message = self.messages[found.turn]
        thoughts = message["content"].partition("</think>")[0] if "</think>" in message["content"] else ""
        thoughts = thoughts.rpartition("<think>")[2].strip() or message.get(REASONING[0], "")
        said = f"{thoughts}\n</think>\n\n{found.text[found.start : found.end].lstrip()}"
        end = len(prompt) + len(said)
        return replace(found, text=prompt + said + found.stop, start=len(prompt), end=end)

    def _check_answer(self, found: Answer) -> None:
        """Raise InputError where an answer's calls, or its words if it has no calls, are rendered as nothing."""
        message, said = self.messages[found.turn], found.text[found.start : found.end]
        calls = [call.get("function", call) for call in message.get("tool_calls", [])]
        names = [call["name"] for call in calls if isinstance(call.get("name"), str)]
        if left_out := [name for name in names if name not in said]:
            raise InputError(
                f"{self.place}: message {found.turn + 1} (assistant): the chat template renders no call of "
                f"{', '.join(left_out)}; leave its tool_calls out, or use a template that has them"
            )
        if message.get(REASONING[0], "") not in said:
            raise InputError(
                f"{self.place}: message {found.turn + 1} (assistant): the chat template renders its reasoning as "
                "nothing; leave that out, write it into `content`, or use a template that has it"
            )
        if not names and message["content"].rpartition("</think>")[2].strip() not in said:
            self._check_rendered(found.turn, found.turn + 1)

    def _check_rendered(self, turn: int, upto: int) -> None:
        """Raise InputError unless other words in a message make another text."""
        some = self.messages[:upto] if self._tried(self.messages[:upto]) is not None else self.messages
        message = some[turn]
        other = [*some[:turn], {**message, "content": OTHER}, *some[turn + 1 :]]
        if self._tried(other) == self._tried(some):
            raise InputError(
                f"{self.place}: message {turn + 1} ({message['role']}): the chat template renders it as nothing; leave "
                "it out, or use a template that has it"
            )

    def _marked_answer(self, turn: int, text: str) -> Answer:
        """The answer as the template's `{% generation %}` mark has it."""
        spans, earlier = self._marks(self.messages[: turn + 1]), self._marks(self.messages[:turn])
        if (marks := len(spans) - len(earlier)) != 1:
            raise InputError(
                f"{self.place}: message {turn + 1} (assistant): the chat template marks {marks} spans "
                "of it as generated; use a template with one mark for each answer, or with none"
            )
        return self._without_stop(turn, text, *spans[-1])

    def _marks(self, messages: Messages) -> list[tuple[int, int]]:
        """Begin and end of each span that the template marks; none where it refuses the messages."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._tried(messages) is None:
            return []
        template, names = self.tokenizer.chat_template, self.tokenizer.special_tokens_map
        given = {"tools": self.tools, "chat_template": template, "return_assistant_tokens_mask": True, **names}
        return list(render_jinja_template([messages], **given)[1][0])


def _label(conversation: Conversation, chain: list[Answer]) -> Iterator[tuple[int, int]]:
    """Tokens of the last answer's text, up to the end of that answer, labeled where one of the chain lies."""
    text, tokenizer = chain[-1].text, conversation.tokenizer
    spans: list[tuple[int, int, str]] = []  # beginning, end, and what is learned there in the place of what follows
    for answer in chain:
        after, following = conversation.special.match(text, answer.end), conversation.messages[answer.turn + 1 :]
        answered = bool(following) and following[0]["role"] == "assistant"
        if after and (after[1] == answer.stop or not (answer.stop or answered)):
            spans.append((answer.start, after.end(), ""))  # what opens the next turn may be what ends this one
        else:
            if not answer.stop and tokenizer.eos_token is None:
                raise InputError(
                    f"{conversation.place}: the chat template ends no answer, and the model's tokenizer has no EOS "
                    "token for it"
                )
            spans.append((answer.start, answer.end, answer.stop or str(tokenizer.eos_token)))
    n = 0
    for token, begin, end in tokens(tokenizer, text[: spans[-1][1]], [border for span in spans for border in span[:2]]):
        label = IGNORED
        while n < len(spans) and begin >= spans[n][1]:
            label = tokenizer.convert_tokens_to_ids(spans[n][2]) if spans[n][2] else label
            n += 1
        # One across the beginning of an answer is the answer's.
        yield token, token if n < len(spans) and end > spans[n][0] else label
    if stop := spans[-1][2]:
        yield (tokenizer.convert_tokens_to_ids(stop),) * 2


def _common(one: str, other: str) -> int:
    """Length of the common beginning, by halving what may be it."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        same = one[least:middle] == other[least:middle]
        least, most = (middle, most) if same else (least, middle - 1)
    return least
