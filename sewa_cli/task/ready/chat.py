"""Chats: lists of messages, as text by a tokenizer's chat template, and where its answers stand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sewa_cli.errors import TaskError
from sewa_cli.task.ready.tables import Row
from sewa_cli.task.ready.text import check_unicode
from sewa_cli.text import one_line

Message = dict[str, Any]
Span = tuple[int, int]  # characters of a text
ANSWERS = "assistant"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def conversation(row: Row, column: str) -> list[Message]:
    """The messages of a row, each with a role and a text; TaskError that names the row if not."""
    found, where = row.get(column), f"{row.where}: {column}"
    if not isinstance(found, list) or not found:
        raise TaskError(f"{where}: must be a list of messages, found {_seen(found)}")
    messages = []
    for number, message in enumerate(found, 1):
        if not isinstance(message, Mapping):
            raise TaskError(f"{where}: message {number}: must be an object, found {_seen(message)}")
        # a table has every key in every message, empty where there is nothing
        given = {key: value for key, value in message.items() if value is not None}
        for key in ("role", "content"):
            if key == "content" and "tool_calls" in given:
                continue
            if not isinstance(given.get(key), str):
                seen = _seen(given.get(key))
                raise TaskError(f"{where}: message {number}: {key}: must be text, found {seen}")
        everything = json.dumps(given, ensure_ascii=False, default=str)
        check_unicode(f"{where}: message {number}", everything)
        messages.append(given)
    return messages


def _seen(value: object) -> str:
    return "nothing" if value is None or value == [] else type(value).__name__


def answers(
    tokenizer: Any, row: Row, messages: Sequence[Message], first: int = 0
) -> tuple[str, list[Span]]:
    """Return a chat's text and the spans of its answers, without messages before `first`.

    Where the template marks what is generated, by its marks; else an answer is what is added to a
    chat that asks for one, which must not change what stands before it.
    """
    template = _template(tokenizer)
    marked = _by_marks(tokenizer, row, messages, template) if _MARKS.search(template) else None
    if marked is not None:
        start = len(render(tokenizer, row, messages[:first])) if first else 0
        return marked[0], [span for span in marked[1] if span[0] >= start]
    whole, spans = render(tokenizer, row, messages), []
    for i, message in enumerate(messages):
        if message["role"] != ANSWERS or i < first:
            continue
        after = render(tokenizer, row, messages[: i + 1])
        if i == 0:  # no template renders nothing
            before = after[: max(0, after.find(message.get("content", "")))]
        else:
            before = render(tokenizer, row, messages[:i], add_generation_prompt=True)
        if not (after.startswith(before) and whole.startswith(after)):
            raise TaskError(
                f"{row.where}: the chat template renders message {i + 1} in another way when "
                "others follow, so that answers cannot be found; mark them in it by "
                "{% generation %}"
            )
        spans.append((len(before), len(after)))
    return whole, spans


def _by_marks(
    tokenizer: Any, row: Row, messages: Sequence[Message], template: str
) -> tuple[str, list[Span]] | None:
    """Return None if this version of transformers cannot say where the marks are.

    Not by `return_assistant_tokens_mask`, which loses every answer from the first one that begins
    with a character without a token of its own, such as a space.
    """
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        return None
    with _rendering(row):
        [text], [spans] = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    return text, [(start, end) for start, end in spans]


def _template(tokenizer: Any) -> str:
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:
        raise TaskError(
            "the tokenizer has no chat template (chat_template.jinja, or in tokenizer_config.json)"
        ) from None
    return template


def render(tokenizer: Any, row: Row, messages: Sequence[Message], **options: Any) -> str:
    with _rendering(row):
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    return text


@contextmanager
def _rendering(row: Row) -> Iterator[None]:
    """Report whatever a template raises as a fault of the row."""
    try:
        yield
    except Exception as error:
        reason = one_line(error, 200)
        raise TaskError(f"{row.where}: the chat template refuses it: {reason}") from error
