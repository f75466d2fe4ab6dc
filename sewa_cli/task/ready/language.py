"""Texts as rows of tokens, of which none is lost: for causal and masked language models.

A text that is too long is cut into rows, not truncated. In a causal row every token is predicted
from those before it in the row, and the last one predicts the first of the next row: so every token
of a text but its first is a target exactly once, and none is read twice.

Rows of one text depend on each other, so each has a label of its text. A packed row has that of the
text in its middle: whichever fills more than half of it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.task.ready.batches import IGNORED
from sewa_cli.task.ready.tables import Row
from sewa_cli.task.ready.text import Example, as_text, check_unicode, label_of
from sewa_cli.text import one_line

Message = dict[str, Any]
Span = tuple[int, int]  # characters of a text
ANSWERS = "assistant"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_KEPT, _RANDOM = 0.1, 0.1  # of the masked: left as they are, replaced by any token


@dataclass(frozen=True)
class Tokens:
    """A text, and which of its tokens are to be predicted."""

    ids: list[int]
    wanted: list[bool]

    @classmethod
    def plain(cls, ids: list[int]) -> Tokens:
        return cls(ids, [True] * len(ids))


@dataclass(frozen=True)
class Language:
    """Rows of language models; `tokenizer` is one of transformers'."""

    tokenizer: Any
    max_length: int
    pack: bool

    # ---- what is read ------------------------------------------------------------------------

    def texts(self, rows: Sequence[Row], column: str) -> list[Tokens]:
        encoded = self._encode([as_text(row, column) for row in rows])
        return [Tokens.plain(self._with_one_start(ids)) for ids in encoded]

    def chats(self, rows: Sequence[Row], column: str) -> list[Tokens]:
        """Messages as the tokenizer's chat template renders them; the answers are wanted."""
        chats = [(row, conversation(row, column)) for row in rows]
        return [
            self._marked(*answers(self.tokenizer, row, messages), special=False)
            for row, messages in chats
        ]

    def completions(self, rows: Sequence[Row], prompt: str, completion: str) -> list[Tokens]:
        """A prompt and what has to follow it, both texts or both lists of messages."""
        return [self._completion(row, prompt, completion) for row in rows]

    def _completion(self, row: Row, prompt: str, completion: str) -> Tokens:
        if isinstance(row.get(prompt), list):
            before = conversation(row, prompt)
            whole = [*before, *conversation(row, completion)]
            text, spans = answers(self.tokenizer, row, whole, first=len(before))
            return self._marked(text, spans, special=False)
        start, end = as_text(row, prompt), as_text(row, completion)
        found = self._marked(start + end, [(len(start), len(start + end))], special=True)
        last = self.tokenizer.eos_token_id
        if last is None or found.ids[-1:] == [last]:
            return found
        return Tokens([*found.ids, last], [*found.wanted, True])

    def _marked(self, text: str, spans: Sequence[Span], special: bool) -> Tokens:
        """Wanted are the tokens that have a character in one of the spans."""
        if not self.tokenizer.is_fast:
            raise TaskError(
                "chats and prompts need a fast tokenizer (tokenizer.json), which knows where a "
                "token stands in its text"
            )
        encoded = self.tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, verbose=False
        )
        wanted = [
            any(start < span_end and span_start < end for span_start, span_end in spans)
            for start, end in encoded["offset_mapping"]
        ]
        ids = self._with_one_start(encoded["input_ids"])
        last = self.tokenizer.eos_token_id
        if special and spans and wanted and ids[-1] == last:  # which the tokenizer has added
            wanted[-1] = True
        return Tokens(ids, wanted[-len(ids) :] if ids else [])

    def _encode(self, texts: list[str], special: bool = True) -> list[list[int]]:
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=special, verbose=False)[
            "input_ids"
        ]
        return encoded

    def _with_one_start(self, ids: list[int]) -> list[int]:
        """A text may begin with the token that the tokenizer puts before it, as a rendered chat."""
        first = self.tokenizer.bos_token_id
        return ids[1:] if first is not None and ids[:2] == [first, first] else ids

    # ---- rows of them ------------------------------------------------------------------------

    def causal(self, texts: Sequence[Tokens]) -> list[Example]:
        """Every wanted token is the target of the one before it."""
        labelled = [(text, [label_of(text.ids)] * len(text.ids)) for text in texts]
        if self.pack:
            labelled = [self._joined(labelled)]
        return [example for one in labelled for example in self._cut(*one)]

    def _cut(self, text: Tokens, labels: Sequence[int]) -> Iterator[Example]:
        """Its rows; those with nothing to predict are left out, unless there are no others."""
        targets = [i if w else IGNORED for i, w in zip(text.ids, text.wanted, strict=True)][1:]
        if all(target == IGNORED for target in targets):
            yield self._example(text.ids[:1], [IGNORED], labels[:1])
            return
        for start in range(0, len(targets), self.max_length):
            end = min(start + self.max_length, len(targets))
            if any(target != IGNORED for target in targets[start:end]):
                of_targets = labels[start + 1 : end + 1]
                yield self._example(text.ids[start:end], targets[start:end], of_targets)

    def _joined(self, texts: Sequence[tuple[Tokens, list[int]]]) -> tuple[Tokens, list[int]]:
        """One after the other, each ended by the token for that, and the label of each token."""
        end = self._end(self.tokenizer.eos_token_id)
        ids: list[int] = []
        wanted: list[bool] = []
        labels: list[int] = []
        for text, of_text in texts:
            ids += text.ids
            wanted += text.wanted
            labels += of_text
            if text.ids[-1:] != [end]:
                ids.append(end)
                wanted.append(all(text.wanted))  # of a chat, only the answers
                labels.append(labels[-1] if labels else 0)
        return Tokens(ids, wanted), labels

    def _end(self, *tokens: int | None) -> int:
        found = next((token for token in tokens if token is not None), None)
        if found is None:
            raise ConfigError(
                "args.pack: the tokenizer has no EOS token to join texts with; leave it out"
            )
        return found

    def masked(
        self, rows: Sequence[Row], column: str, probability: float, seed: int
    ) -> list[Example]:
        """Some tokens are masked (80 %), replaced (10 %) or kept (10 %), and are the targets.

        Drawn once, row by row: every average is evaluated on the same masks, whatever the batches.
        """
        if self.tokenizer.mask_token_id is None:
            raise TaskError(
                "kind: masked-lm: the tokenizer has no mask token; use another tokenizer"
            )
        draw = random.Random(seed)
        special = set(self.tokenizer.all_special_ids)
        words = [i for i in range(len(self.tokenizer)) if i not in special]
        examples = []
        texts = self._encode([as_text(r, column) for r in rows], special=False)
        for ids, label in self._bracketed(texts):
            targets = [IGNORED] * len(ids)
            seen = list(ids)
            for place, token in enumerate(ids):
                if token in special or draw.random() >= probability:
                    continue
                targets[place] = token
                fate = draw.random()
                if fate >= _KEPT + _RANDOM:
                    seen[place] = self.tokenizer.mask_token_id
                elif fate >= _KEPT:
                    seen[place] = draw.choice(words)
            examples.append(self._example(seen, targets, [label]))
        return examples

    def _bracketed(self, texts: list[list[int]]) -> Iterator[tuple[list[int], int]]:
        """Rows of texts, with the tokenizer's special tokens around each, and their labels."""
        before, after = self._brackets
        space = self.max_length - len(before) - len(after)
        if space < 1:
            raise ConfigError(
                f"args.max_length: {self.max_length} leaves no space between the special "
                "tokens; raise it"
            )
        labels = [[label_of(ids)] * (len(ids) + 1) for ids in texts]
        if self.pack:
            end = self._end(self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
            labels = [[label for own in labels for label in own]]
            texts = [[token for ids in texts for token in [*ids, end]][:-1]]
        for ids, own in zip(texts, labels, strict=True):
            for start in range(0, max(1, len(ids)), space):
                here = slice(start, start + space)
                yield [*before, *ids[here], *after], _middle(own[here])

    @cached_property
    def _brackets(self) -> tuple[list[int], list[int]]:
        """The special tokens before a text, and those after it."""
        [bare], [whole] = self._encode(["a"], special=False), self._encode(["a"])
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]

    def _example(self, ids: list[int], targets: list[int], labels: Sequence[int]) -> Example:
        inputs = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if "token_type_ids" in self.tokenizer.model_input_names:
            inputs["token_type_ids"] = [0] * len(ids)
        return Example(inputs, targets, text=_middle(labels))


def _middle(labels: Sequence[int]) -> int:
    return labels[len(labels) // 2] if labels else 0


# ---- chats: as text by a tokenizer's chat template, and where its answers stand -----------------


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

    Not by `return_assistant_tokens_mask`, which loses every answer from the first that begins
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
            "the tokenizer has no chat template (chat_template.jinja, or in "
            "tokenizer_config.json); add one"
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
