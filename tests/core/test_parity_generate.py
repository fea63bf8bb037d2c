"""Greedy continuations of every family, token for token those of transformers' ``generate``."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from families import CONFIGS
from theirs import libraries, random_model

from spmd_distill.generation import generate
from spmd_distill.interop import open_huggingface
from spmd_distill.mappers import make_mapper
from spmd_distill.models import FAMILIES, decoder, load_params

pytestmark = pytest.mark.parity
NEW, ROWS = 12, (3, 9, 14, 20)
"""Prompts shorter and longer than the windows (5); 14 crosses the length (16) from where phi3-long turns otherwise."""
MARGIN = 3e-4
"""By how much the best logit is above the second in every choice: far more than rounding moves them."""


def prompts() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(3, 131, n) for n in ROWS]


@cache
def made(name: str) -> Any:
    """transformers' model with random weights, all of which count."""

    def scale(key: str) -> float:
        return 0.1 if "norm" in key or ("embed" in key and name.startswith("gemma")) else 0.4  # Gemmas scale it up

    model = random_model(name, scale)
    model.generation_config.eos_token_id = None
    return model


@cache
def theirs(name: str, eos: tuple[int, ...] | None = None) -> list[list[int]]:
    """New tokens of each prompt, read in one batch that is padded on the left; it holds no two equal choices."""
    torch, _ = libraries()
    model, found = made(name), []
    # Theirs turns all rows of a batch by the frequencies of the longest; one row at a time it means what ours does.
    batches = [[p] for p in prompts()] if name == "phi3-long" else [prompts()]
    for batch in batches:
        width = max(map(len, batch))
        ids, mask = torch.zeros((2, len(batch), width), dtype=torch.long)
        for i, row in enumerate(batch):
            ids[i, width - len(row) :], mask[i, width - len(row) :] = torch.tensor(row), 1
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0,
                eos_token_id=eos and list(eos), return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        best = torch.stack(out.logits).sort(-1).values
        rows = out.sequences[:, width:].tolist()
        for i, row in enumerate(rows):
            end = next((k + 1 for k, x in enumerate(row) if x in (eos or ())), len(row))
            assert (best[:end, i, -1] - best[:end, i, -2]).min() > MARGIN, "a tie: take another seed"
            found.append(row[:end])
    return found


def ours(folder: Any, layout: str, eos: tuple[int, ...]) -> list[list[int]]:
    config, weights = open_huggingface(folder)
    family = FAMILIES[config["architectures"][0]]
    sizes = family.config_from_huggingface(config)
    model, mapper = decoder(sizes), make_mapper("shard_map", layout)
    params = load_params(model, family.rules(sizes), weights, mapper)
    found = generate(model, params, mapper, prompts(), max_new_tokens=NEW, eos_ids=eos)
    return [row.tolist() for row in found]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens(name, tmp_path):
    made(name).save_pretrained(tmp_path)
    expected = theirs(name)
    assert len({token for row in expected for token in row}) > 6
    assert ours(tmp_path, "single", ()) == expected


@pytest.mark.parametrize(("name", "layout"), [("gemma3", "fsdp2_sp4"), ("smollm2", "dp2_tp4")])
def test_rows_end_where_theirs_end(name, layout, tmp_path):
    made(name).save_pretrained(tmp_path)
    free = theirs(name)
    eos = free[0][3], free[2][6]
    expected = theirs(name, eos)
    assert min(map(len, expected)) <= 4 and expected[0][-1] in eos
    assert ours(tmp_path, layout, eos) == expected
