"""Where the answers lie in a conversation, as the tokenizer's own chat template renders it.

For each answer the template is rendered up to it, with the generation prompt, and past it: what the second adds is the
answer. TRL's marked templates are not put in the place of a tokenizer's own: they keep old reasoning, and a model would
learn to answer after text that it never sees. Marks of the tokenizer's own template are obeyed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trimtab.errors import InputError

OTHER = "\u0394\u0394other words\u0394\u0394"
"""Stands in the place of a message's words, to see where the template puts them."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """The answer `text[start:end]` of a turn; `stop` is the token that ends it, empty where the template has none."""

    turn: int
    text: str
    start: int
    end: int
    stop: str


class Conversation:
    """One conversation and its renderings.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: as the template takes them.
        tools: the tools that the assistant may call, or None.
        place: where the conversation lies, for messages.
    """

    def __init__(self, tokenizer: Any, messages: Messages, tools: Any, place: str) -> None:
        self.tokenizer, self.messages, self.tools, self.place = tokenizer, messages, tools, place

    def chains(self, turns: list[int]) -> Iterator[list[Answer]]:
        """The answers of `turns`. Those of a chain lie in its last one's text, each in the context that it will have.

        Raises InputError where the template refuses the messages, or renders one of them as nothing.
        """
        chain: list[Answer] = []
        for turn in turns:
            answer = self._answer(turn)
            if chain and answer.text[: chain[-1].end] != chain[-1].text[: chain[-1].end]:
                yield chain
                chain = []
            chain.append(answer)
        self._check_all_rendered(turns[-1], chain[-1].text)
        yield chain

    @cached_property
    def special(self) -> re.Pattern[str]:
        """One special token, with the white space before it."""
        tokens = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        tokens |= set(self.tokenizer.all_special_tokens)
        longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
        return re.compile(rf"\s*({'|'.join(longest_first) or '(?!)'})")

    @property
    def has_marks(self) -> bool:
        """Whether the template says itself what is generated."""
        template = self.tokenizer.chat_template
        return isinstance(template, str) and re.search(r"{%-?\s*generation\s*-?%}", template) is not None

    def is_answered(self, turn: int) -> bool:
        """Whether another answer follows that of a turn."""
        return any(message["role"] == "assistant" for message in self.messages[turn + 1 : turn + 2])

    def _render(self, messages: Messages, *, prompt: bool = False) -> str:
        """The conversation as text. Raises InputError with the template's own words."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # the template is the user's program: whatever it raises is about their data
            raise self._refused(error) from error
        return str(text).encode("utf-8", "replace").decode()

    def _tried(self, messages: Messages, *, prompt: bool = False) -> str | None:
        """The same, or None where the template refuses, as many do what does not begin with a user."""
        try:
            return self._render(messages, prompt=prompt)
        except InputError:
            return None

    def _refused(self, error: Exception) -> InputError:
        return InputError(f"{self.place}: the chat template refused the messages: {error}")

    def _answer(self, turn: int) -> Answer:
        prompt = self._tried(self.messages[:turn], prompt=True)
        text = self._tried(self.messages[: turn + 1])
        if text is not None and self.has_marks:
            found = self._marked_answer(turn)
        elif text is not None and prompt is not None and text.startswith(prompt):
            found = self._without_stop(turn, text, len(prompt), len(text))
        else:
            found = self._answer_by_words(turn, prompt)
        self._check_answer(found)
        return self._with_thoughts(found, prompt)

    def _without_stop(self, turn: int, text: str, start: int, end: int) -> Answer:
        said = text[start:end].rstrip()
        stop = next((m for m in self.special.finditer(said) if m.end() == len(said)), None)
        if stop is None:
            return Answer(turn, text, start, start + len(said), "")
        return Answer(turn, text, start, start + stop.start(1), stop[1])

    def _answer_by_words(self, turn: int, prompt: str | None) -> Answer:
        """Where the answered conversation does not begin with the prompt: by other words in the answer's place.

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
        least = _common(earlier, text) if earlier is not None else 0
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
        """What the template adds where an answer is to come."""
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
        thoughts = thoughts.rpartition("<think>")[2].strip() or message.get("reasoning_content", "").strip()
        said = f"{thoughts}\n</think>\n\n{found.text[found.start : found.end].lstrip()}"
        end = len(prompt) + len(said)
        return replace(found, text=prompt + said + found.stop, start=len(prompt), end=end)

    def _check_answer(self, found: Answer) -> None:
        """Raise InputError where an answer's calls, or its words if it has no calls, are rendered as nothing."""
        message, said = self.messages[found.turn], found.text[found.start : found.end]
        names = _called(message)
        if left_out := [name for name in names if name not in said]:
            raise InputError(
                f"{self.place}: message {found.turn + 1} (assistant): the chat template renders no call of "
                f"{', '.join(left_out)}; leave its tool_calls out, or use a template that has them"
            )
        words = message["content"].rpartition("</think>")[2].strip()
        if not names and words not in said:
            self._check_rendered(found.turn, found.turn + 1)

    def _check_all_rendered(self, last: int, text: str) -> None:
        """Raise InputError if a message that is no answer, before the last one, is rendered as nothing."""
        for turn, message in enumerate(self.messages[:last]):
            if message["role"] != "assistant" and message["content"].strip() not in text:
                self._check_rendered(turn, last + 1)

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

    def _marked_answer(self, turn: int) -> Answer:
        """The answer as the template's `{% generation %}` mark has it."""
        text, spans = self._render_marked(self.messages[: turn + 1])
        earlier = self._render_marked(self.messages[:turn])[1] if turn else []
        if (marks := len(spans) - len(earlier)) != 1:
            raise InputError(
                f"{self.place}: message {turn + 1} (assistant): the chat template marks {marks} spans "
                "of it as generated; use a template with one mark for each answer, or with none"
            )
        return self._without_stop(turn, text, *spans[-1])

    def _render_marked(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and from where to where what is marked lies in it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), (spans,) = render_jinja_template(
                [messages],
                tools=self.tools,
                chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # as above
            raise self._refused(error) from error
        return text, spans


def _called(message: dict[str, Any]) -> list[str]:
    """The names of the functions that a message calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls", [])]
    return [call["name"] for call in calls if isinstance(call.get("name"), str)]


def _common(one: str, other: str) -> int:
    """Length of the common beginning, by halving: slices are compared fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
