import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from spmd_distill.interop import TextTokenizer, compare_tokenizers

LETTERS = list("abcdefghijklmnopqrstuvwxyzĠ")
SPECIAL = ["<|unk|>", "<|start|>", "<|end|>"]


def make(
    tokens=(*SPECIAL, *LETTERS, "th"), special=SPECIAL, merges=(("t", "h"),), roles=None, template=None, split=True
):
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return TextTokenizer(tokenizer, {"bos": "<|start|>", "eos": "<|end|>"} if roles is None else roles, template)


def test_the_same():
    found = compare_tokenizers(make(), make())
    assert found.same and found.same_splitting and found.same_chat_template
    assert (found.sizes, found.different_ids, found.first_different, found.different_roles) == ((31, 31), 0, (), ())
    assert found.only_special == ((), ()) and found.pad_is_eos == (False, False)
    assert found.describe() == "The tokenizers are the same: 31 and 31 ids."


def test_other_strings_for_ids():
    other = (*SPECIAL, *reversed(LETTERS), "th", "extra")
    found = compare_tokenizers(make(), make(other))
    assert not found.same and found.sizes == (31, 32)
    expected = [(i, a, b) for i, (a, b) in enumerate(zip(LETTERS, reversed(LETTERS), strict=True), 3) if a != b]
    expected += [(31, None, "extra")]
    assert found.different_ids == len(expected) == 27
    assert found.first_different == tuple(expected[:10])
    lines = found.describe().split("\n")
    assert lines[:4] == [
        "The tokenizers are different: 31 and 32 ids.",
        "27 ids stand for different tokens (teacher, student):",
        "  3: 'a', 'Ġ'",
        "  4: 'b', 'z'",
    ]
    assert lines[-1] == "  ..." and len(lines) == 13


def test_a_vocabulary_that_goes_on():
    found = compare_tokenizers(make((*SPECIAL, *LETTERS, "th", "more")), make())
    assert found.first_different == ((31, "more", None),) and not found.same
    assert "  31: 'more', none" in found.describe() and "..." not in found.describe()


ACROSS = {"tokens": (*SPECIAL, *LETTERS, "th", "nĠ"), "merges": (("t", "h"), ("n", "Ġ"))}


def lowercase() -> TextTokenizer:
    tokenizer = Tokenizer.from_str(make()._tokenizer.to_str())
    tokenizer.normalizer = normalizers.Lowercase()
    return TextTokenizer(tokenizer, make().roles)


@pytest.mark.parametrize(
    ("teacher", "student"),
    [(make(), make(merges=())), (make(**ACROSS), make(**ACROSS, split=False)), (make(), lowercase())],
    ids=["merges", "splitting", "normalizer"],
)
def test_the_same_vocabulary_used_in_another_way(teacher, student):
    found = compare_tokenizers(teacher, student)
    assert found.different_ids == 0 and not found.same_splitting and not found.same
    assert "The vocabularies are the same, but text is cut into other tokens." in found.describe()


def test_rules_that_make_no_difference_are_none():
    plain = make()
    tokenizer = Tokenizer.from_str(plain._tokenizer.to_str())
    tokenizer.normalizer = normalizers.Sequence([])
    other = TextTokenizer(tokenizer, plain.roles)
    assert other.fingerprint() != plain.fingerprint() and compare_tokenizers(plain, other).same


def test_special_tokens_and_roles():
    teacher = make(roles={"bos": "<|start|>", "eos": "<|end|>", "pad": "<|end|>"})
    student = make(special=SPECIAL[:2], roles={"eos": "<|unk|>", "pad": "<|unk|>", "unk": "<|unk|>"})
    found = compare_tokenizers(teacher, student)
    assert found.different_roles == (
        ("bos", "<|start|>", None),
        ("eos", "<|end|>", "<|unk|>"),
        ("pad", "<|end|>", "<|unk|>"),
        ("unk", None, "<|unk|>"),
    )
    assert found.only_special == (("<|end|>",), ()) and found.pad_is_eos == (True, True) and not found.same
    text = found.describe()
    for line in (
        "bos: '<|start|>' in the teacher, none in the student.",
        "Special in the teacher, not in the student: '<|end|>'.",
        "The teacher pads with its end of text.",
        "The student pads with its end of text.",
    ):
        assert line in text.split("\n")


def test_padding_and_template_leave_the_ids_the_same():
    roles = {"bos": "<|start|>", "eos": "<|end|>"}
    found = compare_tokenizers(make(roles=roles | {"pad": "<|unk|>"}, template="a"), make(roles=roles, template="b"))
    assert found.same and not found.same_chat_template
    assert found.describe().split("\n") == [
        "The tokenizers are the same: 31 and 31 ids.",
        "pad: '<|unk|>' in the teacher, none in the student.",
        "The chat templates differ.",
    ]
