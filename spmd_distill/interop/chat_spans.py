"""Which part of a rendered conversation the assistant wrote."""

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from spmd_distill.errors import UserError
from spmd_distill.interop.chat import has_generation_blocks, render_chat, render_generated

Span = tuple[int, int]
"""First character, and the one after the last."""


def assistant_spans(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokens: Mapping[str, str],
    specials: Collection[str],
    source: str,
    last_only: bool = False,
    now: datetime | None = None,
) -> tuple[str, list[Span]]:
    """Render a conversation, and tell what a model that stands for the assistant would have to write.

    That is, for each of its messages, what follows after the conversation before it was given with the generation
    prompt, up to the end of the turn: the first special token behind which the turn has only white space and more
    special tokens. Where the template has ``{% generation %}`` blocks, they tell instead.

    Args:
        template: Jinja source.
        messages: ``{"role": ..., "content": ...}`` in order.
        tokens: ``bos_token`` and the like, for the template.
        specials: The control tokens, one of which ends a turn.
        source: Where the template comes from, for error messages.
        last_only: Only the last message, which must be the assistant's.
        now: What the template takes for the present, if it asks; None is the clock.

    Returns:
        The text, and a span of it for each message of the assistant (for each block).

    Raises:
        UserError: The template refuses the messages; or it writes a conversation differently once it goes on
        (thoughts taken out of earlier turns), so that what the assistant was given cannot be told from the text.
    """
    now = now or datetime.now()  # one for all that is compared
    text = render_chat(template, messages, False, tokens, source, now)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if last_only:
        turns = turns[-1:]
        if not turns or turns[0] != len(messages) - 1:
            raise UserError("the last message is not the assistant's, so there is no completion")
    if has_generation_blocks(template) and not last_only:
        _, spans = render_generated(template, messages, tokens, source, now)
        spans = [span for span in spans if span[0] < span[1]]
        if turns and not spans:
            raise UserError(f"{source}: its chat template wrote no {{% generation %}} block for these messages")
        return text, [_with_end(text, span, tokens.get("eos_token"), specials) for span in spans]
    return text, [_turn(template, messages, turn, tokens, specials, source, now, text) for turn in turns]


def _turn(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    turn: int,
    tokens: Mapping[str, str],
    specials: Collection[str],
    source: str,
    now: datetime,
    text: str,
) -> Span:
    """The span of one message, from what the template makes of the conversation before and with it."""
    try:
        before = render_chat(template, messages[:turn], True, tokens, source, now)
        bare = render_chat(template, messages[:turn], False, tokens, source, now)
        through = render_chat(template, messages[: turn + 1], False, tokens, source, now)
    except UserError as error:
        if turn:
            raise
        raise UserError(
            f"the assistant speaks first, and the chat template cannot write what stands before it ({error})"
        ) from None
    if not (through.startswith(before) and text.startswith(through)):
        raise UserError(
            f"{source}: its chat template writes the messages before message {turn} differently when the "
            "conversation goes on, so what the assistant wrote cannot be told. Give a template with "
            "{% generation %} blocks, or train on the last answer alone (loss: completion)"
        )
    rest = through[len(before) :]
    if before == bare and any(rest.lstrip().startswith(token) for token in specials):
        raise UserError(
            f"{source}: its chat template writes no generation prompt, so the head of the answer would be learned. "
            "Let it end in what opens an answer where `add_generation_prompt` is true"
        )
    return _with_end(text, (len(before), len(through)), None, specials)


def _with_end(text: str, span: Span, eos: str | None, specials: Collection[str]) -> Span:
    """End a turn with the first of the special tokens at its end; with the EOS right behind it if it has none."""
    first, last = span
    if specials:
        any_special = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
        found = re.search(rf"({any_special})(?:\s|{any_special})*\Z", text[first:last])
        if found:
            return first, first + found.end(1)
    if eos and text.startswith(eos, last):
        return first, last + len(eos)
    return span
