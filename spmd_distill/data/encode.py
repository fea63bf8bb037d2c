"""Records -> examples: the tokens of a record, and which of them the student learns to produce."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, get_args

import numpy as np

from spmd_distill.data.base import BadRecord, Example, Record
from spmd_distill.data.sources import json_kind
from spmd_distill.errors import UserError
from spmd_distill.interop.chat import check_template
from spmd_distill.interop.tokenizer import TextTokenizer
from spmd_distill.interop.tokenizer_spans import byte_offsets

Loss = Literal["all", "completion", "assistant"]
"""Which tokens are learned: all of them; a record's completion, or a conversation's last answer; every answer."""

TooLong = Literal["cut", "refuse"]
"""What becomes of a record of too many tokens."""

NOW = datetime(2025, 1, 1)
"""The day that chat templates are told: tokens must not depend on when they are made."""


class Encoder:
    """Makes the example of a record; see `make_encoder`."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        loss: Loss,
        template: str | None,
        add_special: bool,
        max_tokens: int | None,
        too_long: TooLong,
    ):
        self.tokenizer = tokenizer
        self.loss: Loss = loss
        self.cut = 0
        """How many examples were cut to ``max_tokens``."""
        self._template, self._add_special = template, add_special
        self._max_tokens, self._too_long = max_tokens, too_long

    def __call__(self, record: Record) -> Example:
        """The tokens of a record.

        Raises:
            BadRecord: Its fields are not known or of the wrong type, its text is empty or has no UTF-8 form, its
            messages do not go into the chat template, it has too many tokens, or nothing in it is learned.
            UserError: It is a conversation, and there is no chat template.
        """
        value, where = record.value, record.where
        if value.get("messages") is not None:
            ids, loss = self._conversation(value["messages"], where)
        elif value.get("prompt") is not None and value.get("completion") is not None:
            ids, loss = self._completion(value, where)
        elif value.get("text") is not None:
            ids, loss = self._text(value, where)
        else:
            found = ", ".join(map(repr, value)) or "nothing"
            raise BadRecord(where, f"no known fields: found {found}, expected text, prompt and completion, or messages")
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            if self._too_long == "refuse":
                raise BadRecord(where, f"too long: {len(ids)} tokens, at most {self._max_tokens} are allowed")
            ids, loss = ids[: self._max_tokens], loss[: self._max_tokens]
            if not loss[1:].any():
                raise BadRecord(where, f"too long: nothing of its first {self._max_tokens} tokens is learned")
            self.cut += 1
        if not loss[1:].any():
            raise BadRecord(where, f"nothing to learn: none of its {len(ids)} tokens counts in the loss")
        return Example(ids, loss)

    def fingerprint(self) -> str:
        """The sha256 (hex) of everything but the record that decides an example."""
        template = self._template if self._template is not None else self.tokenizer.chat_template
        parts = [self.tokenizer.fingerprint(), self.tokenizer.roles, self.loss, template, self._add_special]
        parts += [self._max_tokens, self._too_long, self.tokenizer.encode("", add_special_tokens=True).tolist()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _text(self, value: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        text = _string(value, "text", where)
        if self.loss != "all":
            raise BadRecord(
                where, f"nothing to mask: it is plain text, and loss is {self.loss!r}; expected loss: all for text"
            )
        ids = self.tokenizer.encode(text, add_special_tokens=self._add_special)
        return self._with_eos(ids, np.ones(len(ids), bool))

    def _completion(self, value: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        prompt, completion = _string(value, "prompt", where, empty=True), _string(value, "completion", where)
        text = prompt + completion
        if self.loss == "all":
            ids = self.tokenizer.encode(text, add_special_tokens=self._add_special)
            return self._with_eos(ids, np.ones(len(ids), bool))
        return self._with_eos(*self._masked(text, [(len(prompt), len(text))], self._add_special))

    def _conversation(self, messages: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
        _check_messages(messages, where)
        if self._template is None and self.tokenizer.chat_template is None:
            raise UserError(
                f"{self.tokenizer.source}: has no chat template, and {where} is a conversation. Give a template, or "
                "use the tokenizer of an instruct model."
            )
        try:
            if self.loss == "all":
                text = self.tokenizer.apply_chat(messages, False, template=self._template, now=NOW)
                spans = []
            else:
                last_only = self.loss == "completion"
                text, spans = self.tokenizer.apply_chat_spans(
                    messages, template=self._template, last_only=last_only, now=NOW
                )
        except UserError as error:
            raise BadRecord(where, f"chat template: {error}") from None
        _check_unicode(text, where)
        if self.loss == "all":
            ids = self.tokenizer.encode(text)
            return ids, np.ones(len(ids), bool)
        return self._masked(text, spans, add_special=False)

    def _masked(self, text: str, spans: Sequence[tuple[int, int]], add_special: bool) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a text, and which of them hold a byte of one of these spans of its characters.

        A token that straddles the border of a prompt and a completion is learned: otherwise nothing would teach
        the bytes of the completion that it holds, which may be all of it. A token without bytes (the blank that some
        tokenizers put before a word) is learned where the next one is.
        """
        ids, of_token = self.tokenizer.encode_spans(text, add_special_tokens=add_special)
        at = byte_offsets(text)
        loss = np.zeros(len(ids), bool)
        begin, end = of_token[:, 0], np.maximum(of_token[:, 1], of_token[:, 0] + 1)
        for first, last in spans:
            loss |= (begin < at[last]) & (end > at[first])
        return ids, loss

    def _with_eos(self, ids: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """End with the EOS, and learn it."""
        eos = self.tokenizer.eos_id
        if not self._add_special or eos is None:
            return ids, loss
        if len(ids) and ids[-1] == eos:
            return ids, np.append(loss[:-1], True)
        return np.append(ids, np.int32(eos)), np.append(loss, True)


def make_encoder(
    tokenizer: TextTokenizer,
    *,
    loss: Loss = "all",
    template: str | None = None,
    add_special: bool = True,
    max_tokens: int | None = None,
    too_long: TooLong = "cut",
) -> Encoder:
    """What turns a record into an example; a callable.

    The kind of a record is seen from its fields: ``messages``, else ``prompt`` and ``completion``, else ``text``.

    Args:
        tokenizer: Of teacher and student.
        loss: What is learned. "all": every token. "completion": the completion, or the last answer of a
            conversation. "assistant": every answer of a conversation, or the completion.
        template: A chat template (Jinja source) in place of the tokenizer's.
        add_special: Put around text what the tokenizer's own rule puts there (a BOS, for some), and an EOS behind
            it, which is learned. Conversations get what their template writes, and nothing else.
        max_tokens: The most tokens of an example, at least 2; None is no limit.
        too_long: "cut" drops what is above and counts it (`Encoder.cut`); "refuse" raises `BadRecord`.

    Raises:
        UserError: A setting is none of these, or the template is malformed.
    """
    check_choice("loss", loss, Loss)
    check_choice("too_long", too_long, TooLong)
    if max_tokens is not None and max_tokens < 2:
        raise UserError(f"max_tokens: found {max_tokens}, expected at least 2: a token is learned after another one.")
    if template is not None:
        check_template(template, "template")
    return Encoder(tokenizer, loss, template, add_special, max_tokens, too_long)


def check_choice(setting: str, found: str, choices: Any) -> None:
    """Raise `UserError` where a setting is none of the values of a ``Literal``."""
    if found not in get_args(choices):
        raise UserError(f"{setting}: found {found!r}, expected one of {', '.join(get_args(choices))}.")


def _string(value: Mapping[str, Any], field: str, where: str, empty: bool = False) -> str:
    text = value[field]
    if not isinstance(text, str):
        raise BadRecord(where, f"wrong type: {field!r} is {json_kind(text)}, expected a string")
    _check_unicode(text, where)
    if not (text or empty):
        raise BadRecord(where, f"empty: {field!r} holds no text")
    return text


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(
            where, f"no Unicode text: character {error.start} is the lone surrogate {text[error.start]!r}"
        ) from None


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list):
        raise BadRecord(where, f"wrong type: 'messages' is {json_kind(messages)}, expected an array")
    if not messages:
        raise BadRecord(where, "empty: 'messages' holds no message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRecord(where, f"wrong type: message {number} is {json_kind(message)}, expected an object")
        for field, types in (("role", str), ("content", str | list)):
            if not isinstance(message.get(field), types):
                found = json_kind(message[field]) if field in message else "missing"
                raise BadRecord(where, f"wrong type: {field!r} of message {number} is {found}, expected a string")
