"""Records -> tokens and loss masks: by bytes, against templates whose spans are written out by hand."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spmd_distill.data import Record, make_encoder
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


def make(template=None, eos="<|im_end|>", bos="<|begin_of_text|>", byte_level=True) -> TextTokenizer:
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
