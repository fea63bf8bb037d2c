"""What keeps two tokenizers from being one: the logits of a teacher mean something only by its own ids."""

from dataclasses import dataclass

import numpy as np

from spmd_distill.interop.tokenizer import ROLES, TextTokenizer

_SHOWN = 10
_SAMPLE = (
    "In 1984, she'd read 12345 pages; IT'S 3.14159 (pi)!?\n\n\tif x == 10:\r\n        return foo_bar(x)  # ok \n"
    "naïve cafe\u0301, straße, 東京タワー, здравствуй, שלום, ١٢٣ ½ 🙂👍🏽\u200b  <b>&amp;</b> http://a.b/c?d=e\n   "
)
"""Digits, contractions, cases, indentation, line ends, composed and decomposed letters, scripts, emoji, markup."""


@dataclass(frozen=True)
class TokenizerDifference:
    """Where a teacher's and a student's tokenizer differ. Pairs are (teacher's, student's)."""

    sizes: tuple[int, int]
    """Ids of each."""
    different_ids: int
    """How many ids stand for another string, or for none in one of the two."""
    first_different: tuple[tuple[int, str | None, str | None], ...]
    """The first ten of them: id, teacher's string, student's string."""
    different_roles: tuple[tuple[str, str | None, str | None], ...]
    """``bos``, ``eos``, ``pad``, ``unk`` whose tokens differ: role, teacher's token, student's token."""
    only_special: tuple[tuple[str, ...], tuple[str, ...]]
    """Tokens that are special (control tokens) in one and not in the other."""
    same_splitting: bool
    """Whether a sample of difficult text, and the text of every token, get the same ids."""
    pad_is_eos: tuple[bool, bool]
    """Whether padding has the id of the end of a text: such padding must be masked by place, not by id."""
    same_chat_template: bool

    @property
    def same(self) -> bool:
        """Whether text becomes the same ids, and ids mean the same. Padding and chat template are not part of it."""
        text = (role for role, _, _ in self.different_roles if role != "pad")
        return not (self.different_ids or any(text) or any(self.only_special)) and self.same_splitting

    def describe(self) -> str:
        """Say it in a few lines."""
        teacher, student = self.sizes
        lines = [f"The tokenizers are {'the same' if self.same else 'different'}: {teacher} and {student} ids."]
        if self.different_ids:
            lines.append(f"{self.different_ids} ids stand for different tokens (teacher, student):")
            lines += [f"  {number}: {_show(a)}, {_show(b)}" for number, a, b in self.first_different]
            if self.different_ids > len(self.first_different):
                lines.append("  ...")
        elif not self.same_splitting:
            lines.append("The vocabularies are the same, but text is cut into other tokens.")
        lines += [
            f"{role}: {_show(a)} in the teacher, {_show(b)} in the student." for role, a, b in self.different_roles
        ]
        for tokens, one, other in zip(self.only_special, ("teacher", "student"), ("student", "teacher"), strict=True):
            if tokens:
                more = ", ..." if len(tokens) > _SHOWN else ""
                shown = ", ".join(map(repr, tokens[:_SHOWN])) + more
                lines.append(f"Special in the {one}, not in the {other}: {shown}.")
        for flag, one in zip(self.pad_is_eos, ("teacher", "student"), strict=True):
            if flag:
                lines.append(f"The {one} pads with its end of text.")
        if not self.same_chat_template:
            lines.append("The chat templates differ.")
        return "\n".join(lines)


def compare_tokenizers(teacher: TextTokenizer, student: TextTokenizer) -> TokenizerDifference:
    """Compare two tokenizers, id by id and in what they make of text; some seconds for large vocabularies."""
    by_id = [{number: token for token, number in tokenizer.vocabulary.items()} for tokenizer in (teacher, student)]
    different = sorted(n for n in by_id[0].keys() | by_id[1].keys() if by_id[0].get(n) != by_id[1].get(n))
    special = [tokenizer.special_tokens for tokenizer in (teacher, student)]
    roles = [tokenizer.roles for tokenizer in (teacher, student)]
    return TokenizerDifference(
        sizes=(teacher.vocab_size, student.vocab_size),
        different_ids=len(different),
        first_different=tuple((n, by_id[0].get(n), by_id[1].get(n)) for n in different[:_SHOWN]),
        different_roles=tuple(
            (role, roles[0].get(role), roles[1].get(role)) for role in ROLES if roles[0].get(role) != roles[1].get(role)
        ),
        only_special=(
            tuple(token for token in special[0] if token not in special[1]),
            tuple(token for token in special[1] if token not in special[0]),
        ),
        same_splitting=_same_splitting(teacher, student),
        pad_is_eos=(_pad_is_eos(teacher), _pad_is_eos(student)),
        same_chat_template=teacher.chat_template == student.chat_template,
    )


def _same_splitting(teacher: TextTokenizer, student: TextTokenizer) -> bool:
    if teacher.fingerprint() == student.fingerprint():
        return True
    texts = [_SAMPLE, *(teacher.decode([number]) for number in teacher.vocabulary.values())]
    pairs = zip(teacher.encode_batch(texts), student.encode_batch(texts), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _pad_is_eos(tokenizer: TextTokenizer) -> bool:
    return tokenizer.pad_id is not None and tokenizer.pad_id == tokenizer.eos_id


def _show(token: str | None) -> str:
    return "none" if token is None else repr(token)
