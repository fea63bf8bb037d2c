"""Records -> tokens and loss masks: by bytes, against templates whose spans are written out by hand."""

import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from spmd_distill.data import BadRecord, Intake, PackedRows, Record, TokenTable, make_encoder, plan
from spmd_distill.data.base import AbstractSource
from spmd_distill.data.encode import Loss, check_choice
from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer

CORPUS = ["the cat sat on the mat in 1984", "user assistant system you are a helpful", "naïve 東京 🙂🙃 straße"] * 4
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% if message['role'] == 'assistant' %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)


def make(template=None, eos="<|im_end|>", bos="<|begin_of_text|>") -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return TextTokenizer(tokenizer, {"eos": eos, "pad": eos, "bos": bos}, template)


def learned(tokenizer, example) -> list[str]:
    """The text of each run of learned tokens."""
    runs, last = [], False
    for token, loss in zip(example.tokens.tolist(), example.loss.tolist(), strict=True):
        if loss and not last:
            runs.append([])
        if loss:
            runs[-1].append(token)
        last = loss
    return [tokenizer.decode(run) for run in runs]


TALK = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat 🙂"},
    {"role": "user", "content": "on"},
    {"role": "assistant", "content": "the mat"},
]


@pytest.mark.parametrize(
    ("template", "eos", "bos", "end"),
    [
        (SMOLLM2, "<|im_end|>", "<|im_start|>", "<|im_end|>"),
        (LLAMA3, "<|eot_id|>", "<|begin_of_text|>", "<|eot_id|>"),
        (GEMMA, "<|endoftext|>", "<bos>", "<end_of_turn>"),
    ],
    ids=["smollm2", "llama3", "gemma"],
)
def test_every_answer_and_its_end_of_turn_is_learned_and_nothing_else(template, eos, bos, end):
    tokenizer = make(template, eos, bos)
    record = Record({"messages": TALK}, "chat.jsonl, line 1")
    example = make_encoder(tokenizer, loss="assistant")(record)
    assert learned(tokenizer, example) == [f"sat 🙂{end}", f"the mat{end}"]
    assert example.tokens.tolist() == tokenizer.encode(tokenizer.apply_chat(TALK, False)).tolist()
    last = make_encoder(tokenizer, loss="completion")(record)
    assert learned(tokenizer, last) == [f"the mat{end}"] and np.array_equal(last.tokens, example.tokens)
    whole = make_encoder(tokenizer, loss="all")(record)
    assert whole.loss.all() and np.array_equal(whole.tokens, example.tokens)


def test_an_answer_is_what_follows_the_prompt_that_generation_would_be_given():
    for template in (SMOLLM2, LLAMA3, GEMMA):
        tokenizer = make(template)
        text, spans = tokenizer.apply_chat_spans(TALK)
        for turn, (first, last) in zip((1, 3), spans, strict=True):
            assert text[:first] == tokenizer.apply_chat(TALK[:turn])
            assert text[first:last].startswith(TALK[turn]["content"])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([*TALK, {"role": "user", "content": "more"}], ["sat 🙂<|im_end|>", "the mat<|im_end|>"]),
        ([{"role": "system", "content": "you are"}, *TALK[:2]], ["sat 🙂<|im_end|>"]),
        ([*TALK[:2], {"role": "assistant", "content": "again"}], ["sat 🙂<|im_end|>", "again<|im_end|>"]),
        ([TALK[0], {"role": "assistant", "content": ""}], ["<|im_end|>"]),
        ([TALK[0], {"role": "assistant", "content": "a <|im_end|> b"}], ["a <|im_end|> b<|im_end|>"]),
        ([{"role": "user", "content": "sat 🙂<|im_end|>\n<|im_start|>assistant\nsat"}, TALK[1]], ["sat 🙂<|im_end|>"]),
        ([TALK[0], {"role": "assistant", "content": " \n sat \n"}], [" \n sat \n<|im_end|>"]),
    ],
    ids=["ends with the user", "system", "two answers", "empty", "end inside", "user plays the assistant", "blanks"],
)
def test_conversations_of_every_shape(messages, expected):
    tokenizer = make(SMOLLM2)
    example = make_encoder(tokenizer, loss="assistant")(Record({"messages": messages}, "x"))
    assert learned(tokenizer, example) == expected


MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        MARKED,
        MARKED.replace("{% generation %}", "{%- generation -%}"),
        MARKED.replace(" + '<|im_end|>\n' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>\n' }}"),
        "{% macro say(m) %}" + MARKED.replace("for m in messages", "for m in [m]") + "{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}",
        MARKED.replace("m['content']", "(m['content'] if not loop.last else m['content'])")
        + "{% if messages | length > 2 %}{{ 'not stable' }}{% endif %}",
    ],
    ids=["whole turn", "blanks cut", "end outside", "macro", "not prefix-stable"],
)
def test_generation_blocks_of_a_template_tell_what_is_learned(template):
    tokenizer = make()
    example = make_encoder(tokenizer, loss="assistant", template=template)(Record({"messages": TALK}, "x"))
    assert learned(tokenizer, example) == ["sat 🙂<|im_end|>", "the mat<|im_end|>"]
    assert "\ufdd0" not in tokenizer.decode(example.tokens)


THINKS = (  # thoughts stay in the last answer alone, as in the templates of reasoning models
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (THINKS, TALK, "writes the messages before message 1 differently when the conversation goes on"),
        (SMOLLM2.replace("{% endfor %}", "{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}"), TALK,
         "writes the messages before message 1 differently"),
        (SMOLLM2.split("{% if add_gen")[0], TALK, "writes no generation prompt, so the head of the answer"),
        (SMOLLM2, TALK[1:], "writes the messages before message 0 differently"),
        (SMOLLM2.replace("loop.first and ", ""), TALK[1:], "writes the messages before message 0 differently"),
        ("{{ messages[0]['role'] }}" + MARKED.replace("generation", "if true").replace("endif true", "endif"), TALK[1:],
         "the assistant speaks first, .* cannot write what stands before it"),
        (GEMMA, [{"role": "system", "content": "x"}, *TALK], "System role not supported"),
        (GEMMA, [TALK[0], *TALK], "Roles must alternate"),
        (MARKED.replace("{% endg", "{% generation %}{% endgeneration %}{% endg"), TALK,
         "nests or changes its {% generation %} blocks"),
        (MARKED.replace("{% generation %}{{", "{% set x %}{% generation %}{{ ' ' +")
         .replace("{% endgeneration %}", "{% endgeneration %}{% endset %}{{ x | trim }}"), TALK,
         "nests or changes its {% generation %} blocks"),
        (MARKED.replace("m['role'] == 'assistant'", "false"), TALK, "wrote no {% generation %} block"),
        (MARKED, [TALK[0], {"role": "assistant", "content": "\ufdd0"}], r"hold the characters U\+FDD0"),
        ("{{ messages[7].content.x }}", TALK, "cannot write these 4 messages"),
        ("{{ 1 / 0 }}", TALK, "cannot write these 4 messages"),
        ("{{ messages.append(1) }}", TALK, "cannot write these 4 messages"),
        ("{{ ''.split('') }}", TALK, "cannot write these 4 messages"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_tell_the_answers_is_refused(template, messages, message):
    encode = make_encoder(make(), loss="assistant", template=template)
    with pytest.raises(BadRecord, match="chat.jsonl, line 1: chat template: .*" + message):
        encode(Record({"messages": messages}, "chat.jsonl, line 1"))


def test_the_tokens_of_a_conversation_do_not_depend_on_the_day():
    tokenizer = make("{{ strftime_now('%d %B %Y') }}\n" + SMOLLM2)
    for loss in ("all", "completion", "assistant"):
        example = make_encoder(tokenizer, loss=loss)(Record({"messages": TALK}, "x"))
        assert tokenizer.decode(example.tokens).startswith("01 January 2025\n<|im_start|>")
    assert not tokenizer.apply_chat(TALK).startswith("01 January 2025"), "a model that is asked gets the clock"


def test_the_last_answer_needs_no_stable_template():
    tokenizer = make(THINKS)
    example = make_encoder(tokenizer, loss="completion")(Record({"messages": TALK}, "x"))
    assert learned(tokenizer, example) == ["<think>\n\n</think>\n\nthe mat<|im_end|>"]
    with pytest.raises(BadRecord, match="last message is not the assistant's"):
        make_encoder(tokenizer, loss="completion")(Record({"messages": TALK[:3]}, "x"))


def test_the_side_of_a_token_that_straddles_prompt_and_completion():
    tokenizer = make()
    assert "Ġcat" in tokenizer.vocabulary
    encode = make_encoder(tokenizer, loss="completion")
    apart = encode(Record({"prompt": "the", "completion": " cat"}, "x"))
    astride = encode(Record({"prompt": "the ", "completion": "cat"}, "x"))
    assert apart.tokens.tolist() == astride.tokens.tolist()
    assert learned(tokenizer, astride) == [" cat<|im_end|>"], "or nothing would teach the completion"
    assert apart.loss.tolist() == astride.loss.tolist()


@pytest.mark.parametrize(
    ("prompt", "completion"), [("a", "🙂 b"), ("🙂", "🙃"), ("a🙂", "b"), ("東", "京🙂"), ("", "🙂")]
)
def test_a_mask_is_exact_to_the_byte_where_a_character_is_many_tokens(prompt, completion):
    tokenizer = make()
    example = make_encoder(tokenizer, loss="completion", add_special=False)(
        Record({"prompt": prompt, "completion": completion}, "x")
    )
    of_bytes = np.concatenate([np.full(len(prompt.encode()), False), np.full(len(completion.encode()), True)])
    _, spans = tokenizer.encode_spans(prompt + completion)
    assert example.loss.tolist() == [bool(of_bytes[a:b].any()) for a, b in spans]
    assert learned(tokenizer, example)[0].endswith(completion)


def test_padding_that_is_the_eos_does_not_matter():
    tokenizer = make()
    assert tokenizer.pad_id == tokenizer.eos_id
    example = make_encoder(tokenizer, loss="completion")(Record({"prompt": "a<|im_end|>", "completion": "b"}, "x"))
    assert example.tokens[-1] == tokenizer.eos_id and example.loss.tolist() == [False, False, True, True]
    ended = make_encoder(tokenizer, loss="completion")(Record({"prompt": "a", "completion": "b<|im_end|>"}, "x"))
    assert ended.tokens.tolist().count(tokenizer.eos_id) == 1 and ended.loss[-1]


def test_an_eos_that_the_tokenizer_adds_itself_is_learned_and_not_doubled():
    tokenizer = make()
    inner = Tokenizer.from_str(tokenizer._tokenizer.to_str())
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    inner.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|im_end|>", special_tokens=[("<|begin_of_text|>", bos), ("<|im_end|>", eos)]
    )
    around = TextTokenizer(inner, tokenizer.roles)
    record = Record({"prompt": "the", "completion": " cat"}, "x")
    example = make_encoder(around, loss="completion")(record)
    assert example.tokens.tolist() == [bos, *tokenizer.encode("the cat").tolist(), eos]
    assert example.loss.tolist() == [False, False, True, True]
    bare = make_encoder(around, loss="completion", add_special=False)(record)
    assert bare.tokens.tolist() == tokenizer.encode("the cat").tolist() and bare.loss.tolist() == [False, True]


def test_text_is_learned_whole_with_an_eos_behind_it():
    tokenizer = make()
    record = Record({"text": "the cat"}, "x")
    example = make_encoder(tokenizer)(record)
    plain = make_encoder(tokenizer, add_special=False)(record)
    assert example.tokens.tolist() == [*plain.tokens.tolist(), tokenizer.eos_id] and example.loss.all()
    assert plain.tokens.tolist() == tokenizer.encode("the cat").tolist()
    pair = make_encoder(tokenizer)(Record({"prompt": "the", "completion": " cat"}, "x"))
    assert pair.tokens.tolist() == example.tokens.tolist() and pair.loss.all()
    assert example.tokens.dtype == np.int32 and example.loss.dtype == bool


@pytest.mark.parametrize(
    ("value", "loss", "message"),
    [
        ({}, "all", "no known fields: found nothing"),
        ({"prompt": "x", "body": 1}, "all", "no known fields: found 'prompt', 'body'"),
        ({"text": 3}, "all", "wrong type: 'text' is a number"),
        ({"text": b"x"}, "all", "wrong type: 'text' is a value of type bytes"),
        ({"text": ""}, "all", "empty: 'text' holds no text"),
        ({"text": "x"}, "completion", "nothing to mask: it is plain text"),
        ({"text": "a\ud800"}, "all", "no Unicode text: character 1 is the lone surrogate"),
        ({"prompt": "x", "completion": ""}, "all", "empty: 'completion'"),
        ({"prompt": [], "completion": "x"}, "all", "wrong type: 'prompt' is an array"),
        ({"messages": {}}, "all", "wrong type: 'messages' is an object"),
        ({"messages": []}, "all", "empty: 'messages' holds no message"),
        ({"messages": ["x"]}, "all", "wrong type: message 0 is a string"),
        ({"messages": [{"role": "user"}]}, "all", "wrong type: 'content' of message 0 is missing"),
        ({"messages": [{"role": None, "content": "x"}]}, "all", "wrong type: 'role' of message 0 is null"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "all", "no Unicode text"),
        ({"messages": TALK[:1]}, "assistant", "nothing to learn: none of its"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(value, loss, message):
    with pytest.raises(BadRecord, match=f"a.jsonl, line 3: {message}"):
        make_encoder(make(SMOLLM2), loss=loss)(Record(value, "a.jsonl, line 3"))


def test_what_is_too_long_is_cut_and_counted_or_refused():
    tokenizer = make(SMOLLM2)
    record = Record({"text": "the cat sat on the mat"}, "x")
    whole = make_encoder(tokenizer)(record)
    size = len(whole.tokens)
    encode = make_encoder(tokenizer, max_tokens=size - 1)
    cut = encode(record)
    assert cut.tokens.tolist() == whole.tokens[:-1].tolist() and len(cut.loss) == size - 1 and encode.cut == 1
    exact = make_encoder(tokenizer, max_tokens=size)
    assert len(exact(record).tokens) == size and exact.cut == 0
    with pytest.raises(BadRecord, match=f"too long: {size} tokens, at most {size - 1} are allowed"):
        make_encoder(tokenizer, max_tokens=size - 1, too_long="refuse")(record)
    with pytest.raises(BadRecord, match="too long: nothing of its first 8 tokens is learned"):
        make_encoder(tokenizer, loss="assistant", max_tokens=8)(Record({"messages": TALK}, "x"))


def test_settings_that_cannot_be_are_refused():
    for settings, message in (
        ({"max_tokens": 1}, "max_tokens: found 1"),
        ({"template": "{% for %}"}, "template: its chat template is malformed in line 1"),
        ({"template": "{% generation %}"}, "template: its chat template is malformed"),
    ):
        with pytest.raises(UserError, match=message):
            make_encoder(make(), **settings)
    with pytest.raises(UserError, match="loss: found 'some', expected one of all, completion, assistant"):
        check_choice("loss", "some", Loss)
    with pytest.raises(UserError, match="has no chat template, and x is a conversation") as error:
        make_encoder(make())(Record({"messages": TALK}, "x"))
    assert not isinstance(error.value, BadRecord), "no record could be read"


def test_a_fingerprint_is_of_all_that_decides_an_example():
    tokenizer = make(SMOLLM2)
    settings = [{}, {"loss": "completion"}, {"template": LLAMA3}, {"add_special": False}, {"max_tokens": 9}]
    settings.append({"max_tokens": 9, "too_long": "refuse"})
    encoders = [make_encoder(tokenizer, **setting) for setting in settings]
    encoders += [make_encoder(make(LLAMA3)), make_encoder(make(SMOLLM2, eos="<|eot_id|>"))]
    prints = [encode.fingerprint() for encode in encoders]
    assert len(set(prints)) == len(prints) - 1 and prints[2] == prints[6], "one template, given in two ways"
    assert [pickle.loads(pickle.dumps(encode)).fingerprint() for encode in encoders] == prints


def terms(examples, how):
    """What the loss of packed rows sums over: (example's segment position, token, label), counted."""
    table = TokenTable.of(examples)
    rows = PackedRows(table, plan(table, 64, how)).take(range(len(plan(table, 64, how))))
    at = np.nonzero(rows.mask)
    fields = (rows.positions[at], rows.tokens[at], rows.labels[at])
    return Counter(zip(*(field.tolist() for field in fields), strict=True))


@pytest.mark.parametrize("how", ["first_fit", "none", "concatenate"])
def test_one_flag_more_or_less_is_one_term_more_or_less_of_the_packed_loss(how):
    tokenizer = make(SMOLLM2)
    chat = make_encoder(tokenizer, loss="assistant")(Record({"messages": TALK[:2]}, "x"))
    pair = make_encoder(tokenizer, loss="completion")(Record({"prompt": "the 🙂", "completion": " cat 東"}, "x"))
    assert len(chat.tokens) + len(pair.tokens) <= 64, "one row, so that no piece is cut"
    given = terms([chat, pair], how)
    assert given.total() == np.count_nonzero(chat.loss[1:]) + np.count_nonzero(pair.loss[1:])
    for example, other in ((chat, pair), (pair, chat)):
        for i in range(len(example.tokens)):
            loss = example.loss.copy()
            loss[i] = not loss[i]
            moved = terms([replace(example, loss=loss), other], how)
            more, less = moved - given, given - moved
            change = more if loss[i] else less
            term = (i - 1, int(example.tokens[i - 1]), int(example.tokens[i]))
            assert (more if change is less else less) == Counter()
            assert change == (Counter() if i == 0 else Counter([term]))


def test_a_border_moved_by_one_token_moves_one_term():
    tokenizer = make()
    words = ["the", " cat", " sat", " on", " the", " mat"]
    assert len(tokenizer.encode("".join(words))) == len(words), "a word is a token"
    encode = make_encoder(tokenizer, loss="completion")
    for border in range(1, len(words)):
        prompt, completion = "".join(words[:border]), "".join(words[border:])
        example = encode(Record({"prompt": prompt, "completion": completion}, "x"))
        assert example.loss.tolist() == [False] * border + [True] * (len(words) - border + 1)


class Given(AbstractSource):
    name = "given"

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        if isinstance(self.values[index], str):
            raise BadRecord(f"given, line {index + 1}", self.values[index])
        return Record(self.values[index], f"given, line {index + 1}")

    def fingerprint(self):
        return "0" * 64


def test_bad_records_are_errors_or_skipped_and_counted_by_reason():
    good = {"prompt": "the", "completion": " cat"}
    source = Given([good, "not JSON: line 1", {"text": 3}, good, "not JSON: line 2", {}, {"text": "x" * 40}])
    encode = make_encoder(make(), max_tokens=20)
    with pytest.raises(BadRecord, match=r"^given, line 2: not JSON: line 1$"):
        list(Intake(source, encode))
    intake = Intake(source, encode, on_bad="skip", keep=3)
    examples = list(intake)
    assert [len(example.tokens) for example in examples] == [3, 3, 20]
    report = intake.report()
    assert (report.records, report.examples, report.tokens, report.learned, report.cut) == (7, 3, 26, 23, 1)
    assert report.bad == {"not JSON": 2, "wrong type": 1, "no known fields": 1}
    assert report.lines() == [
        "given: 3 of 7 records used, 26 tokens, 23 learned, 1 cut",
        "  skipped 4: 2 not JSON, 1 wrong type, 1 no known fields",
        "  given, line 2: not JSON: line 1",
        "  given, line 3: wrong type: 'text' is a number, expected a string",
        "  given, line 5: not JSON: line 2",
        "  and 1 more",
    ]
    assert encode.cut == 1 and Intake(source, encode).report().cut == 0, "counted for each source by itself"
    again = Intake(source, encode, on_bad="skip")
    assert len(list(again)) == 3 and again.report().cut == 1 and encode.cut == 2
    assert Intake(source, encode).example(0) is not None and intake.example(1) is None
    with pytest.raises(UserError, match=r"given: all 2 records are bad. The first: given, line 1: not JSON: x; given"):
        list(Intake(Given(["not JSON: x", {}]), encode, on_bad="skip"))
    with pytest.raises(UserError, match="given: holds no record"):
        list(Intake(Given([]), encode, on_bad="skip"))
