"""Generation: one result on every layout, where rows end, what is compiled, bad input."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from whole_rows import SINGLE, whole

import spmd_distill as sd
from spmd_distill.generation import GREEDY, Sampling, generate
from spmd_distill.generation.loop import Generation
from spmd_distill.generation.run import _batched, _bucket
from spmd_distill.models import Model
from spmd_distill.sharding import REPLICATED
from spmd_distill.state import init_params


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Layouts and mappers

TINY: dict[str, Any] = {
    "vocab_size": 61, "width": 16, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 4, "mlp": 24, "init_std": 0.4,
    "param_dtype": "float64", "window": 4, "logit_softcap": 4.0, "local_layers": (True, False),
}  # fmt: skip
PROMPTS = [[1, 2, 3], [4] * 7, [5], [60, 7, 8, 9, 10]]


@cache
def tiny(**more: Any) -> Model:
    return sd.decoder(sd.DecoderConfig(**TINY | more))


@cache
def numbers(model: Model) -> Any:
    with jax.enable_x64(True):
        return jax.device_get(init_params(model, SINGLE, seed=0))


@cache
def on(layout: str, mapper_name: str, model: Model) -> tuple[Model, Any, Any]:
    mapper = sd.make_mapper(mapper_name, layout)
    return model, jax.device_put(numbers(model), mapper.shardings(model.specs(mapper.layout))), mapper


def run(layout: str = "single", mapper_name: str = "vmap", model: Model | None = None, **more: Any) -> list[list[int]]:
    given: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 10, "compute_dtype": "float64"} | more
    return [ids.tolist() for ids in generate(*on(layout, mapper_name, model or tiny()), **given)]


def greedily(model: Model, prompts: list[list[int]], steps: int) -> list[list[int]]:
    rows = [list(p) for p in prompts]
    for _ in range(steps):
        best = whole(model, numbers(model), [np.array(r) for r in rows])[:, :61].argmax(1)
        rows = [[*row, int(token)] for row, token in zip(rows, best, strict=True)]
    return [row[len(p) :] for row, p in zip(rows, prompts, strict=True)]


@pytest.mark.parametrize(
    ("layout", "mapper_name"),
    [("single", "vmap"), ("sp2_tp4", "shard_map"), ("fsdp2_tp4", "shard_map")],
)
def test_greedy_tokens_are_those_of_passes_over_whole_rows(layout, mapper_name):
    found = run(layout, mapper_name)
    assert found == greedily(tiny(), PROMPTS, 10)
    assert len({tuple(ids) for ids in found}) == len(PROMPTS)


DRAWN = Sampling(1.4, top_p=0.9)


@pytest.mark.parametrize(
    ("layout", "mapper_name"),
    [
        *((name, "shard_map") for name in ("dp2_tp4", "fsdp2_tp4", "tp8", "fsdp2_sp4")),
        ("fsdp2_tp4", "vmap"),
        ("fsdp2_sp4", "pmap"),
        ("replica2_fsdp2_tp2", "pmap"),
    ],
)
def test_the_same_seed_draws_the_same_tokens_on_every_layout(layout, mapper_name):
    assert run(layout, mapper_name, sampling=DRAWN, seed=3) == run(sampling=DRAWN, seed=3)


def test_seeds_rows_and_steps_draw_for_themselves():
    flat = Sampling(100.0)  # as good as uniform
    one, other = (np.array(run(prompts=[[1]] * 4, sampling=flat, seed=seed, max_new_tokens=16)) for seed in (0, 1))
    assert (one != other).mean() > 0.8
    assert all((one[i] != one[j]).mean() > 0.7 for i in range(4) for j in range(i))
    assert all(len(set(row)) > 8 for row in one.tolist())
    assert np.array_equal(one, run(prompts=[[1]] * 4, sampling=flat, seed=0, max_new_tokens=16))


def test_neither_other_rows_nor_room_change_a_row():
    alone = run(prompts=PROMPTS[:1], sampling=DRAWN, max_new_tokens=10)[0]
    assert run(prompts=[PROMPTS[0], [9] * 40], sampling=DRAWN, max_new_tokens=20)[0][:10] == alone


# ---------------------------------------------------------------------------------------------------------------------
# Where rows end


def ended(ids: list[int], ends: set[int]) -> list[int]:
    return next((ids[: i + 1] for i, x in enumerate(ids) if x in ends), ids)


@pytest.mark.parametrize(("layout", "mapper_name"), [("single", "vmap"), ("dp2_tp4", "shard_map")])
def test_a_row_ends_with_any_of_several_ids(layout, mapper_name):
    free = run()
    ends = {free[0][2], free[1][0], free[3][5]}
    expected = [ended(ids, ends) for ids in free]
    assert run(layout, mapper_name, eos_ids=sorted(ends)) == expected
    assert len(expected[1]) == 1 and len(expected[0]) <= 3


@pytest.mark.parametrize("layout", ["single", "fsdp2_tp4"])
def test_the_loop_is_left_when_the_last_row_of_any_shard_has_ended(layout):
    free = run()
    ends = np.array([free[0][1], free[1][0], free[2][4]], np.int32)
    lengths = [len(ended(ids, set(ends.tolist()))) for ids in free]
    assert max(lengths[:2]) < max(lengths[2:]) < 10
    model, params, mapper = on(layout, "vmap", tiny())
    plain = mapper.layout.with_whole_rows()
    one = Generation(model, plain, "float64", 61, GREEDY.kind, 10)
    given = GREEDY.numbers(0) | {"eos": ends, "pad": np.int32(0), "until": np.int32(10)}

    def body(params: Any, prompt: Any, given: Any) -> jax.Array:
        return one.run(params, prompt, given, one.start(params, prompt, given))["step"]

    rows = {"tokens": plain.spec(("batch", None)), "lengths": plain.spec(("batch",))}
    run_steps = jax.jit(mapper.map(body, (model.specs(plain), rows, REPLICATED), REPLICATED))
    for prompts in (PROMPTS, PROMPTS[::-1]):  # the longest row on the first shard, and on the last
        prompt = _batched([np.array(p) for p in prompts], plain.batch_shards)
        assert int(run_steps(params, prompt, given)) == max(lengths)


def test_only_tokens_below_vocab_size_are_chosen():
    free, cut = run(), run(vocab_size=20)
    assert max(map(max, free)) >= 20 > max(map(max, cut))


@pytest.mark.parametrize(("layout", "mapper_name"), [("fsdp2_sp4", "shard_map"), ("replica2_fsdp2_tp2", "pmap")])
def test_tokens_can_be_watched_as_they_come(layout, mapper_name):
    ends = [run(sampling=DRAWN)[0][3]]
    expected, seen = run(sampling=DRAWN, eos_ids=ends), []
    assert run(layout, mapper_name, sampling=DRAWN, eos_ids=ends, on_tokens=seen.append) == expected
    assert [np.concatenate(ids).tolist() for ids in zip(*seen, strict=True)] == expected
    assert len(seen) == max(map(len, expected)) and all(len(ids) <= 1 for step in seen for ids in step)


# ---------------------------------------------------------------------------------------------------------------------
# What is compiled


def test_numbers_rows_and_lengths_of_one_size_share_a_program():
    class Counting(Model):
        traced = 0

        def apply_cached(self, *args: Any) -> Any:
            Counting.traced += 1
            return super().apply_cached(*args)

    plain = tiny()
    model = Counting(plain._make, plain.config)

    def call(prompts: list[list[int]], **more: Any) -> int:
        before = Counting.traced
        generate(model, numbers(plain), SINGLE, prompts, compute_dtype="float64", **more)
        return Counting.traced - before

    warm = Sampling(0.5)
    assert call([*PROMPTS, [1]], sampling=warm, max_new_tokens=20) > 0
    assert not call([*PROMPTS, [1], [2, 3]], sampling=warm, max_new_tokens=24)
    assert not call([[1] * 16] * 5, sampling=Sampling(2.0), max_new_tokens=17, seed=7, eos_ids=[3, 4], pad_id=1)
    assert call([[1] * 17] * 5, sampling=warm, max_new_tokens=20) > 0


def test_sizes_are_at_most_half_as_large_again_as_asked_for():
    sizes = [_bucket(n, 1) for n in range(1, 3000)]
    assert all(n <= size <= 3 * n / 2 for n, size in enumerate(sizes, 1))
    assert sorted(set(sizes))[:9] == [1, 2, 3, 4, 6, 8, 12, 16, 24] and len(set(sizes)) == 23
    assert _bucket(5, 16) == 16


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty; expected at least one token"),
        ({"prompts": [[1, 61]]}, "prompt 0: id 61 at position 1 is none of the model's, which are 0 to 60"),
        ({"prompts": [[1], [3, -1]]}, "prompt 1: id -1 at position 1"),
        ({"prompts": ["to be"]}, "prompt 0 is 'to be'; expected one row of token ids"),
        ({"prompts": [[1.5, 2]]}, "prompt 0 is .*; expected one row of token ids"),
        ({"prompts": [[[1, 2], [3]]]}, "prompt 0 is .*; expected one row of token ids"),
        ({"prompts": [np.ones((2, 3), np.int32)]}, r"prompt 0 is an array of int32 \[2, 3\]; expected one row"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 was given; expected a whole number of at least 1"),
        ({"max_new_tokens": True}, "max_new_tokens: True was given"),
        ({"vocab_size": 62}, "vocab_size: 62 was given; expected a whole number from 1 to 61"),
        ({"eos_ids": [2, 61]}, "eos_ids: 61 was given; expected a whole number from 0 to 60"),
        ({"pad_id": -1}, "pad_id: -1 was given"),
        ({"seed": -1}, "seed: -1 was given"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(sd.UserError, match=message):
        run(**change)


def test_a_model_without_a_cache_is_named():
    with pytest.raises(sd.UserError, match=r"the model is a function; expected one of this library's decoders"):
        generate(lambda params, batch: batch, {}, SINGLE, PROMPTS)


def test_no_prompts_are_no_texts():
    assert run(prompts=[]) == []


def test_there_is_no_longest_row():
    """Nothing is cut at the positions of the training."""
    model = tiny(max_length=8)
    assert run(model=model, prompts=[[1] * 29], max_new_tokens=3) == greedily(model, [[1] * 29], 3)
