"""Render the Jinja chat template of a model: foreign code, run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spmd_distill.errors import UserError


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tokens: Mapping[str, str],
    source: str,
) -> str:
    """Render a conversation with the names, filters and whitespace rules that transformers gives a template.

    Args:
        template: Jinja source.
        messages: ``{"role": ..., "content": ...}`` in order.
        add_generation_prompt: Passed to the template.
        tokens: ``bos_token`` and the like, for the template.
        source: Where the template comes from, for error messages.

    Raises:
        UserError: A message lacks its role or content, or the template is malformed, forbidden or refuses the
        messages.
    """
    for row, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UserError(f"message {row} is {message!r}, expected an object with 'role' and 'content'.")
    try:
        return _compile(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **tokens)
    except (TemplateError, TypeError) as error:
        roles = ", ".join(str(message["role"]) for message in messages) or "none"
        raise UserError(
            f"{source}: its chat template cannot write these {len(messages)} messages (roles: {roles}): "
            f"{error}. Give roles in the order that the template expects, or mend `chat_template`."
        ) from None


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
