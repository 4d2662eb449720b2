"""Messages of a conversation, in the shapes that people write them in, as one: `role`, `content`, `tool_calls`.

What is not read as it stands is counted in `odd`, by the words for it: the run says that once.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from trimtab.errors import InputError

CONVERSATION = "a list of objects with `role` and `content`, or `from` and `value`"
ROLES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool",
    "function": "tool", "tool_response": "tool",
}  # fmt: skip
"""Other formats' names of roles; those that the chat template names are roles, too."""
USUAL = ("system", "developer", "user", "assistant", "tool")
CALLS = ("function_call", "tool_call")
"""Roles of messages whose content is the JSON of an answer's calls."""
NAMED = {*USUAL, *ROLES, *CALLS}
LEARNED = ("weight", "loss", "loss_mask", "loss_weight", "train", "trainable", "training")
"""Keys of a message that say whether it is learned (1, true) or not (0, false)."""
MASKED = ("masked", "is_masked")
"""Those that say the contrary."""
REASONING = ("reasoning_content", "reasoning", "thinking")
SAYS = ("content", "tool_calls", "function_call", "refusal", *REASONING)
"""Keys of which a message has one; that it is empty is another matter."""
KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", *LEARNED, *MASKED}
NO_ANSWER = "answer(s) without words or calls, left out"
NOT_TEXT = "byte(s) that are not UTF-8, read as \ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_messages(messages: Any, place: str, name: str, odd: Counter[str]) -> list[dict[str, Any]]:
    """The messages of column `name` of the record at `place`. Raises InputError for what is none."""
    messages = decoded(messages, place, name)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError(f"{place}: `{name}` must be {CONVERSATION}")
    made: list[dict[str, Any]] = []
    before, called = None, name == "completion"  # whose prompt may end in a call
    for message in messages:
        one = _message(message, place, name, odd)
        if one["role"] != "tool":
            called = bool(one.get("tool_calls"))
        elif not called:
            odd["message(s) of the role tool without a call before"] += 1
        kind = [
            str(message.get("role", message.get("from"))).strip().lower(),
            *(message.get(key) for key in (*LEARNED, *MASKED)),
        ]
        if kind == before and kind[0] in CALLS and "tool_calls" in one and "tool_calls" in made[-1]:
            made[-1]["tool_calls"] += one["tool_calls"]  # several calls of one answer
        else:
            made.append(one)
        before = kind
    return made


def _message(message: dict[str, Any], place: str, name: str, odd: Counter[str]) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    if "role" not in made and "from" in made:
        made = {"role": made.pop("from"), **({"content": made.pop("value")} if "value" in made else {}), **made}
    if not isinstance(role := made.get("role"), str):
        raise InputError(f"{place}: `{name}` must be {CONVERSATION}")
    if role not in NAMED and (folded := role.strip().lower()) in NAMED:
        odd[f"message(s) of the role `{role}`, read as {folded}"] += 1
        role = folded
    made["role"] = "assistant" if role in CALLS else ROLES.get(role, role)
    answer, calls = made["role"] == "assistant", None
    if made.keys().isdisjoint(SAYS):
        raise InputError(f"{place}: a message of the role `{role}` has neither `content` nor `tool_calls`")
    if role in CALLS:
        calls = decoded(made.pop("content", None), place, role)
    elif answer and "function_call" in made:
        calls = decoded(made.pop("function_call"), place, "function_call")
    refusal = made.pop("refusal", None) if answer else None
    if (calls and made.get("tool_calls")) or (refusal and made.get("content")):
        raise InputError(f"{place}: a message has {'two kinds of calls' if calls else '`content` and `refusal`'}")
    if calls:
        made["tool_calls"] = [
            each if isinstance(each, dict) and "function" in each else {"type": "function", "function": each}
            for each in (calls if isinstance(calls, list) else [calls])
        ]
    made["content"] = _text(refusal or made.get("content", ""), place, "content", odd)  # None is printed as "None"
    if "tool_calls" in made:
        calls = decoded(made["tool_calls"], place, "tool_calls")
        if not isinstance(calls, list):
            raise InputError(f"{place}: `tool_calls` must be a list of objects")
        made["tool_calls"] = [_call(call, place) for call in calls]
    known = KNOWN | {*REASONING} if answer else KNOWN
    made |= {key: _text(made[key], place, key, odd) for key in REASONING if answer and key in made}
    odd.update(f"message(s) with the unknown key `{key}`" for key in made.keys() - known)
    if made["role"] not in USUAL:
        odd[f"message(s) of the role `{role}`, not learned"] += 1
    if answer and not made.get("tool_calls") and not made["content"].rpartition("</think>")[2].strip():
        odd[NO_ANSWER] += 1
        made["train"] = False
    return made


def check_roles(messages: list[dict[str, Any]], template: str, place: str) -> None:
    """Raise InputError for a role that neither the usual formats nor the chat template name."""
    for number, role in enumerate((message["role"] for message in messages), 1):
        if role not in USUAL and not re.search(rf"""["']{re.escape(role)}["']""", template):
            raise InputError(
                f"{place}: message {number} has the role `{role}`; roles are {', '.join(USUAL)}, and those that the "
                "chat template names"
            )


def _call(call: Any, place: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise InputError(f"{place}: `tool_calls` must be a list of objects")
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _call(function, place)}
    made = {**call, "arguments": decoded(call["arguments"], place, "arguments")} if "arguments" in call else call
    if not isinstance(call.get("name"), str):
        raise InputError(f"{place}: a call of `tool_calls` has no `name`")
    return made


def _text(value: Any, place: str, name: str, odd: Counter[str]) -> str:
    """A message's text; parts of text are joined, for not every template takes a list."""
    joined = ""
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise InputError(f"{place}: a message has a part of the type {part['type']}; only text can be trained on")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise InputError(f"{place}: the `{name}` of a message must be a string, or a list of its parts")
        joined += text
    return cleaned(joined, odd)


def cleaned(text: str, odd: Counter[str]) -> str:
    """The text without what no tokenizer takes: halves of characters, which JSON can spell and which stand for bytes
    that are no UTF-8. They and NUL are counted."""
    text, halves = _SURROGATE.subn("\ufffd", text)
    odd.update({NOT_TEXT: halves, "NUL character(s)": text.count("\0")})
    return text


def decoded(value: Any, place: str, name: str) -> Any:
    """Decode, once, what some formats keep as JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: `{name}` is a string that is not JSON ({error})") from None
