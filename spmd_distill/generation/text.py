"""Texts and conversations in, texts out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_distill.errors import UserError
from spmd_distill.generation.run import OnTokens, generate
from spmd_distill.generation.sampling import GREEDY, Sampling
from spmd_distill.interop import TextTokenizer

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``."""


def generate_text(
    pretrained: Any,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = GREEDY,
    eos_ids: Sequence[int] | None = None,
    compute_dtype: Any = "float32",
    seed: int = 0,
    on_tokens: OnTokens | None = None,
) -> list[str]:
    """Continue texts and answer conversations, all in one batch; see `generate`.

    Args:
        pretrained: What `load_pretrained` returns, or a tuple (model, params, tokenizer, mapper).
        prompts: A text is encoded with what the model's own rule puts around it (a BOS, for some), and continued. A
            list of messages is written with the chat template, up to where the assistant's answer begins.
        max_new_tokens: How many tokens each may get.
        sampling: How a token is chosen; by default the likeliest.
        eos_ids: Tokens that end a text; None takes `end_ids`.
        compute_dtype: Of matmuls, activations and the cache.
        seed: Of what is drawn.
        on_tokens: Called after every token with the new ids of each prompt.

    Returns:
        What was added to each prompt, without special tokens.

    Raises:
        UserError: ``prompts`` is one text or conversation, not a list; one is empty; there is no chat template; and for
            what `generate` refuses.
    """
    if isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts):
        what = "one text" if isinstance(prompts, str) else "one conversation"
        raise UserError(f"generate_text: prompts is {what}; expected a list of prompts. Write [prompt].")
    model, params, tokenizer, mapper = _parts(pretrained)
    found = generate(
        model,
        params,
        mapper,
        [_encode(tokenizer, prompt, number) for number, prompt in enumerate(prompts)],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_ids=end_ids(pretrained) if eos_ids is None else eos_ids,
        pad_id=tokenizer.pad_id or 0,
        compute_dtype=compute_dtype,
        vocab_size=min(tokenizer.vocab_size, model.config.tokens),
        seed=seed,
        on_tokens=on_tokens,
    )
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


def end_ids(pretrained: Any) -> tuple[int, ...]:
    """The ids that end a text or an answer, sorted: the tokenizer's, and those that the model's folder names.

    The folder says it in ``config.json`` and in ``generation_config.json``; some models end an answer with a token that
    only the second names.
    """
    tokenizer: TextTokenizer = _parts(pretrained)[2]
    named: list[Any] = [tokenizer.eos_id]
    settings = [getattr(pretrained, "huggingface_config", {})]
    path = getattr(getattr(pretrained, "source", None), "path", None)
    if path is not None and (file := path / "generation_config.json").is_file():
        try:
            settings.append(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: is not valid JSON ({error}). Mend it, or say eos_ids.") from None
    for content in settings:
        ids = content.get("eos_token_id") if isinstance(content, Mapping) else None
        named += ids if isinstance(ids, list) else [ids]
    tokens = _parts(pretrained)[0].config.tokens
    return tuple(sorted({i for i in named if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < tokens}))


def _parts(pretrained: Any) -> tuple[Any, Any, TextTokenizer, Any]:
    names = ("model", "params", "tokenizer", "mapper")
    if isinstance(pretrained, tuple) and len(pretrained) == len(names):
        model, params, tokenizer, mapper = pretrained
        return model, params, tokenizer, mapper
    if missing := [name for name in names if not hasattr(pretrained, name)]:
        raise UserError(
            f"generate_text: {type(pretrained).__name__} has no {missing[0]}; expected what load_pretrained returns, "
            f"or a tuple ({', '.join(names)})."
        )
    model, params, tokenizer, mapper = (getattr(pretrained, name) for name in names)
    return model, params, tokenizer, mapper


def _encode(tokenizer: TextTokenizer, prompt: Any, number: int) -> Any:
    """One prompt's ids. Templates write the BOS themselves."""
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=True)
    elif isinstance(prompt, Sequence):
        ids = tokenizer.encode(tokenizer.apply_chat(prompt))
    else:
        raise UserError(f"prompt {number} is {prompt!r}; expected a text, or a list of messages.")
    if not len(ids):
        raise UserError(f"prompt {number} ({prompt!r}) is of no tokens; expected a text to continue.")
    return ids
