"""One text tokenizer for teachers and students, and its Hugging Face folder."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int32, Int64
from tokenizers import Tokenizer

from spmd_distill.errors import UserError
from spmd_distill.interop.chat import render_chat
from spmd_distill.interop.chat_spans import assistant_spans
from spmd_distill.interop.huggingface import listing, read_json
from spmd_distill.interop.tokenizer_spans import ByteSpans

ROLES = ("bos", "eos", "pad", "unk")
"""What a model may have a token for: beginning and end of a text, padding, what it has no token for."""


class TextTokenizer:
    """Text to token ids and back, with the special tokens and the chat template of its model.

    Args:
        tokenizer: The tokenizer itself. Its truncation and padding are switched off: neither may shorten or
            lengthen training text unseen.
        roles: ``bos``, ``eos``, ``pad``, ``unk`` -> token string; what a model lacks is left out.
        chat_template: Jinja source, or None.
        source: Where it comes from, for error messages.

    Raises:
        UserError: A role names a token that the vocabulary does not have.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        roles: Mapping[str, str],
        chat_template: str | None = None,
        source: str = "tokenizer",
    ):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._roles = {role: roles[role] for role in ROLES if role in roles}
        self.chat_template = chat_template
        self.source = source
        for role, token in self._roles.items():
            if tokenizer.token_to_id(token) is None:
                raise UserError(
                    f"{source}: its {role} token {token!r} is not in its vocabulary of "
                    f"{tokenizer.get_vocab_size()} tokens. Use tokenizer files that belong together."
                )
        self._ids = tokenizer.get_vocab(with_added_tokens=True)
        self._spans: ByteSpans | None = None
        self._vocab_size = max(self._ids.values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:
        """Return the ids of a text, int32 ``[tokens]``. Special tokens spelled out in it become those tokens.

        ``add_special_tokens`` adds what the model's own rule puts around a text (a BOS, for some). Raises
        `UserError` for text that has no UTF-8 form.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool = False) -> list[np.ndarray]:
        """Return the ids of many texts, on all cores. Many short texts are far faster than one long one."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError:  # what the library says of lone surrogates
            for row, text in enumerate(texts):
                if not isinstance(text, str):
                    raise
                _check_utf8(text, f"text {row}: ")
            raise
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_spans(
        self, text: str, *, add_special_tokens: bool = False
    ) -> tuple[Int32[np.ndarray, " n"], Int64[np.ndarray, "n 2"]]:
        """Return the ids of a text and the bytes of each, ``[first, after the last)`` of the text's UTF-8 form.

        Slower than `encode`. Every byte belongs to one token; tokens that were added around the text have none.
        Raises `UserError` for text that has no UTF-8 form.
        """
        _check_utf8(text, "")
        if self._spans is None:
            self._spans = ByteSpans(self._tokenizer)
        return self._spans.encode(text, add_special_tokens)

    def decode(self, ids: Iterable[SupportsIndex] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids ``[tokens]``. A character of which only some bytes are there becomes U+FFFD.

        Raises `UserError` for an id outside of the vocabulary, which the library beneath would drop.
        """
        ids = np.asarray(ids if hasattr(ids, "__array__") else list(ids), np.int64)
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if wrong.size:
            raise UserError(
                f"{self.source}: cannot decode id {ids[wrong[0]]} at position {wrong[0]}, expected ids of 0 "
                f"to {self.vocab_size - 1}. The ids belong to another tokenizer."
            )
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one: the rows that an embedding needs. The model's may be padded to more."""
        return self._vocab_size

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token string and its id. Byte-level tokenizers write a byte as a character, a space as Ġ."""
        return dict(self._ids)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The control tokens and their ids, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in sorted(added.items()) if token.special}

    @property
    def roles(self) -> dict[str, str]:
        """``bos``, ``eos``, ``pad``, ``unk`` -> token string; what the model lacks is left out."""
        return dict(self._roles)

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, or None."""
        return self._id("bos")

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text or a chat turn, or None."""
        return self._id("eos")

    @property
    def pad_id(self) -> int | None:
        """The id of padding, or None. It may equal `eos_id`: never tell padding by its id."""
        return self._id("pad")

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        now: datetime | None = None,
    ) -> str:
        """Write a conversation as the text that the model was trained on.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order.
            add_generation_prompt: End with what opens the assistant's answer.
            template: Another chat template than the tokenizer's.
            now: What the template takes for the present, if it asks; None is the clock.

        Raises:
            UserError: There is no chat template, or it refuses the messages.
        """
        source = self.source if template is None else "template"
        return render_chat(self._template(template), messages, add_generation_prompt, self._role_tokens, source, now)

    def apply_chat_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        last_only: bool = False,
        now: datetime | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Write a conversation, and tell which characters of it the assistant has to write.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order.
            template: Another chat template than the tokenizer's.
            last_only: Only the last message.
            now: What the template takes for the present, if it asks; None is the clock.

        Returns:
            The text, and (first, after the last) for each message of the assistant, its end-of-turn token included.

        Raises:
            UserError: There is no chat template, it refuses the messages, or it does not tell the spans; see
            `assistant_spans`.
        """
        source = self.source if template is None else "template"
        return assistant_spans(
            self._template(template), messages, self._role_tokens, self.special_tokens, source, last_only, now
        )

    def fingerprint(self) -> str:
        """Return the sha256 (hex) of everything that decides the ids of a text.

        That is: vocabulary, merges, added tokens, normaliser and pre-tokenizer. Two tokenizers of one
        fingerprint give the same ids; it survives `save`.
        """
        whole = json.loads(self._tokenizer.to_str())
        vocabulary = whole["model"]["vocab"]  # a list with scores for some kinds, whose order matters
        parts = [
            sorted(vocabulary.items()) if isinstance(vocabulary, dict) else vocabulary,
            whole["model"].get("merges"),
            [[token["id"], token["content"], token["special"]] for token in whole["added_tokens"]],
            whole["normalizer"],
            whole["pre_tokenizer"],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into an existing folder."""
        settings: dict[str, Any] = {f"{role}_token": token for role, token in self._roles.items()}
        settings |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        Path(folder, "tokenizer.json").write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        Path(folder, "tokenizer_config.json").write_text(text, encoding="utf-8")

    def __repr__(self) -> str:
        return f"TextTokenizer({self.vocab_size} tokens of {self.source})"

    @property
    def _role_tokens(self) -> dict[str, str]:
        return {f"{role}_token": token for role, token in self._roles.items()}

    def _template(self, given: str | None) -> str:
        template = self.chat_template if given is None else given
        if template is None:
            raise UserError(
                f"{self.source}: has no chat template, expected one for a conversation. Use the instruct "
                "version of the model, set `chat_template`, or give plain text."
            )
        return template

    def _id(self, role: str) -> int | None:
        return self._ids.get(self._roles[role]) if role in self._roles else None


def _check_utf8(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}character {error.start} is the lone surrogate {text[error.start]!r}, "
            "expected text that has a UTF-8 form. Read the file as UTF-8 with errors='replace'."
        ) from None


def tokenizer_from_folder(folder: str | os.PathLike[str]) -> TextTokenizer:
    """Read ``tokenizer.json``, ``tokenizer_config.json`` and, where there is one, ``chat_template.jinja``.

    Raises `UserError` naming the file that is missing or malformed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder, expected one with tokenizer.json. Check the path.")
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(
            f"{path}: no such file; the folder holds {listing(folder)}. Load the tokenizer with transformers "
            "once and call save_pretrained(folder), which writes it."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"{path}: is not a tokenizer ({error}), expected a tokenizers JSON. Fetch it again.") from None
    settings = read_json(folder / "tokenizer_config.json")
    roles = {}
    for role in ROLES:
        token = settings.get(f"{role}_token")
        if token is not None:
            roles[role] = token["content"] if isinstance(token, dict) else token
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones, as older releases wrote
        template = {item["name"]: item["template"] for item in template}.get("default")
    beside = folder / "chat_template.jinja"
    if beside.exists():
        template = beside.read_text(encoding="utf-8")
    return TextTokenizer(tokenizer, roles, template, str(folder))
