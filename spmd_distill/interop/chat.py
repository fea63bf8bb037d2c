"""Render the Jinja chat template of a model: foreign code, run in a sandbox."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spmd_distill.errors import UserError

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""What marks the ends of a generation block: characters that Unicode keeps for such uses and no text has."""

_BLOCK = re.compile(r"{%-?\s*generation\s*-?%}")
_BROKEN = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises on messages that it was not written for."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tokens: Mapping[str, str],
    source: str,
    now: datetime | None = None,
) -> str:
    """Render a conversation with the names, filters and whitespace rules that transformers gives a template.

    Args:
        template: Jinja source. What stands in a ``generation`` block is written like everything else.
        messages: ``{"role": ..., "content": ...}`` in order.
        add_generation_prompt: Passed to the template.
        tokens: ``bos_token`` and the like, for the template.
        source: Where the template comes from, for error messages.
        now: What the template takes for the present, if it asks; None is the clock.

    Raises:
        UserError: A message lacks its role or content, or the template is malformed, forbidden or refuses the
        messages.
    """
    return _render(template, messages, add_generation_prompt, tokens, source, now, marks=False)


def render_generated(
    template: str, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, str], source: str, now: datetime | None
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation, and tell which characters the template's ``{% generation %}`` blocks wrote.

    Returns:
        The text of `render_chat`, and (first, after the last) of each block's characters.

    Raises:
        UserError: As `render_chat`; or the template works on what a block has written, so that its place is not
        known.
    """
    text = _render(template, messages, False, tokens, source, now, marks=False)
    marked = _render(template, messages, False, tokens, source, now, marks=True)
    pieces = re.split(f"([{_OPEN}{_CLOSE}])", marked)
    if "".join(pieces[::2]) != text or "".join(pieces[1::2]) != (_OPEN + _CLOSE) * (len(pieces) // 4):
        raise UserError(
            f"{source}: its chat template nests or changes its {{% generation %}} blocks, or the messages hold the "
            "characters U+FDD0 or U+FDD1, so what the assistant wrote cannot be told. Write the blocks plainly."
        )
    ends, at = [], 0
    for piece in pieces[::2]:
        at += len(piece)
        ends.append(at)
    return text, list(zip(ends[:-1:2], ends[1::2], strict=False))


def has_generation_blocks(template: str) -> bool:
    """Whether a template tells what the assistant writes."""
    return _BLOCK.search(template) is not None


def check_template(template: str, source: str) -> None:
    """Raise `UserError` for a template that cannot be compiled, with its line."""
    try:
        _compile(template, False)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise UserError(
            f"{source}: its chat template is malformed{f' in line {line}' if line else ''}: {error}. Mend it."
        ) from None


def _render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tokens: Mapping[str, str],
    source: str,
    now: datetime | None,
    marks: bool,
) -> str:
    for row, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UserError(f"message {row} is {message!r}, expected an object with 'role' and 'content'.")
    try:
        return _compile(template, marks).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            strftime_now=lambda form: (now or datetime.now()).strftime(form),
            **tokens,
        )
    except _BROKEN as error:
        roles = ", ".join(str(message["role"]) for message in messages) or "none"
        raise UserError(
            f"{source}: its chat template cannot write these {len(messages)} messages (roles: {roles}): "
            f"{error}. Give roles in the order that the template expects, or mend `chat_template`."
        ) from None


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``: what stands in it is what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012
    marks = False

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return _OPEN + caller() + _CLOSE if self.marks else caller()


class _MarkedGeneration(_Generation):
    identifier = "marked_generation"
    marks = True


@lru_cache(maxsize=32)
def _compile(template: str, marks: bool) -> Template:
    generation = _MarkedGeneration if marks else _Generation
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, generation]
    )
    environment.filters["tojson"] = _tojson  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
