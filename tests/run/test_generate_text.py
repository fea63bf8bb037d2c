"""Texts and conversations in, texts out."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import tiny_teacher

import spmd_distill as sd
from spmd_distill.generation import end_ids

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def loaded(folder):
    found = sd.load_pretrained(folder, "dp2_tp4")
    found.tokenizer.chat_template = TEMPLATE
    return found


def test_texts_and_conversations_in_one_batch(loaded):
    tokenizer = loaded.tokenizer
    ids = [tokenizer.encode("to be"), tokenizer.encode("<s>[user]hi</s>[assistant]")]
    assert ids[1][0] == 0 and 1 in ids[1]
    expected = sd.generate(loaded.model, loaded.params, loaded.mapper, ids, max_new_tokens=12, eos_ids=[1])
    written = [tokenizer.decode(row, skip_special_tokens=True) for row in expected]
    assert sd.generate_text(loaded, ["to be", CHAT], max_new_tokens=12) == written
    parts = (loaded.model, loaded.params, tokenizer, loaded.mapper)
    assert sd.generate_text(parts, ["to be", CHAT], max_new_tokens=12) == written


def test_sampling_seed_and_watching_are_passed_on(loaded):
    seen = []
    how = {"sampling": sd.Sampling(2.0), "max_new_tokens": 8}
    one, other = (sd.generate_text(loaded, ["a", "b"], seed=seed, **how) for seed in (0, 1))
    assert one != other
    assert sd.generate_text(loaded, ["a", "b"], on_tokens=seen.append, **how) == one
    rows = [np.concatenate(ids) for ids in zip(*seen, strict=True)]
    assert [loaded.tokenizer.decode(row, skip_special_tokens=True) for row in rows] == one


def test_a_text_ends_with_the_ids_that_its_model_names(loaded):
    ids = sd.generate(loaded.model, loaded.params, loaded.mapper, [loaded.tokenizer.encode("to be")], max_new_tokens=12)
    place = next(i for i in range(3, 12) if ids[0][i] not in ids[0][:i])
    config = {"eos_token_id": [int(ids[0][place])]}
    named = dataclasses.replace(loaded, huggingface_config=loaded.huggingface_config | config)
    expected = loaded.tokenizer.decode(ids[0][: place + 1], skip_special_tokens=True)
    assert sd.generate_text(named, ["to be"], max_new_tokens=12) == [expected]
    assert sd.generate_text(named, ["to be"], max_new_tokens=12, eos_ids=()) != [expected]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, (1,)),
        ({"eos_token_id": 7}, None, (1, 7)),
        ({"eos_token_id": [7, 3]}, '{"eos_token_id": [3, 106]}', (1, 3, 7, 106)),
        ({"eos_token_id": None}, '{"eos_token_id": 5}', (1, 5)),
        ({"eos_token_id": 9999}, '{"eos_token_id": "x"}', (1,)),
        ({}, "[]", (1,)),
    ],
)
def test_end_ids_are_those_of_tokenizer_and_folder(loaded, tmp_path, config, generation, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    parts = {name: getattr(loaded, name) for name in ("model", "params", "tokenizer", "mapper")}
    model = SimpleNamespace(**parts, huggingface_config=config, source=SimpleNamespace(path=tmp_path))
    assert end_ids(model) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("to be", "prompts is one text; expected a list of prompts"),
        (CHAT, "prompts is one conversation; expected a list of prompts"),
        (["to be", ""], r"prompt 1 \(''\) is of no tokens"),
        ([[{"role": "user"}]], "expected an object with 'role' and 'content'"),
        ([3], "prompt 0 is 3; expected a text, or a list of messages"),
    ],
)
def test_bad_prompts_are_named(loaded, prompts, message):
    with pytest.raises(sd.UserError, match=message):
        sd.generate_text(loaded, prompts)


def test_a_tokenizer_without_a_template_and_a_broken_file_are_named(loaded, folder, tmp_path):
    plain = sd.load_pretrained(folder, "single")
    with pytest.raises(sd.UserError, match="has no chat template"):
        sd.generate_text(plain, [CHAT])
    with pytest.raises(sd.UserError, match="tuple has no model; expected what load_pretrained returns"):
        sd.generate_text((1, 2), ["a"])
    (tmp_path / "generation_config.json").write_text(json.dumps({})[:1])
    broken = SimpleNamespace(**vars(plain) | {"source": SimpleNamespace(path=tmp_path)})
    with pytest.raises(sd.UserError, match=r"generation_config\.json: is not valid JSON"):
        sd.generate_text(broken, ["a"])
