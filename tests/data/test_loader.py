"""The loader: a pure function of the step, exact over epochs and resumes, and loud when the data changed."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_distill.data import Loader, Rows, eval_batches, pack
from spmd_distill.errors import UserError
from spmd_distill.types import Batch

LENGTH = 4


def numbered_rows(count: int) -> Rows:
    """Rows that can be told apart: row i begins with token 10 * i."""
    return pack([10 * i + np.arange(LENGTH) for i in range(count)], LENGTH)


def served(batch: Batch) -> list[int]:
    return (np.asarray(batch.tokens)[..., 0] // 10).reshape(-1).tolist()


def stream(loader: Loader, first: int, last: int) -> list[int]:
    return [row for step in range(first, last) for row in served(loader.batch(step))]


@given(count=st.integers(1, 9), b=st.integers(1, 4), a=st.integers(1, 3), seed=st.integers(0, 3))
@settings(max_examples=15, deadline=None)  # grain takes 50 ms for an epoch of few rows
def test_each_epoch_holds_each_row_once_whatever_the_batch(count, b, a, seed):
    loader = Loader(numbered_rows(count), batch_rows=b, micro_batches=a, seed=seed)
    steps = -(-3 * count // (a * b))
    rows = stream(loader, 0, steps)
    for epoch in range(3):
        assert sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert loader.epoch(steps) == steps * a * b / count


def test_epochs_and_seeds_have_orders_of_their_own():
    rows = numbered_rows(40)
    one, other = (stream(Loader(rows, 8, 1, seed), 0, 15) for seed in (0, 1))
    orders = [tuple(run[first : first + 40]) for run in (one, other) for first in (0, 40, 80)]
    assert len(set(orders)) == 6 and tuple(range(40)) not in orders
    assert stream(Loader(rows, 8, 1, seed=0, shuffle=False), 0, 15) == list(range(40)) * 3


def test_a_batch_is_the_rows_as_packed():
    rows = numbered_rows(7)
    batch = Loader(rows, batch_rows=3, micro_batches=2, seed=5).batch(1)
    order = served(batch)
    for name in ("tokens", "labels", "mask", "positions", "segments"):
        array, source = getattr(batch, name), getattr(rows, name)
        assert isinstance(array, np.ndarray) and array.dtype == source.dtype
        assert array.shape == (2, 3, LENGTH)
        assert np.array_equal(array.reshape(6, LENGTH), source[order])


def test_the_order_is_the_one_that_saved_runs_were_trained_in():
    # If this fails then grain shuffles in another way than before, and no older run can be resumed exactly.
    assert stream(Loader(numbered_rows(7), 7, 1, seed=3), 0, 2) == [4, 6, 0, 2, 5, 3, 1, 2, 1, 3, 4, 6, 0, 5]


def test_asking_changes_nothing():
    loader = Loader(numbered_rows(9), 2, 2, seed=0)
    there, back = (
        [served(loader.batch(k)) for k in range(6)],
        [served(loader.batch(k)) for k in (5, 4, 3, 2, 1, 0)],
    )
    assert there == back[::-1]


@pytest.mark.parametrize(("step", "count"), [(0, 7), (1, 1), (3, 8), (5, 7), (1000, 4)])
def test_resuming_at_any_step_goes_on_as_if_nothing_had_happened(step, count):
    rows = numbered_rows(count)
    whole = Loader(rows, 2, 3, seed=1)
    state = json.loads(json.dumps(whole.state(step)))
    assert state["next_sample"] == 6 * step and state["rows"] == count and state["seed"] == 1
    resumed = Loader(rows, 2, 3, seed=1)
    resumed.resume(state, step)
    assert stream(resumed, step, step + 4) == stream(whole, step, step + 4)
    assert resumed.state(step + 2) == whole.state(step + 2)


def test_another_batch_size_goes_on_with_the_next_sample():
    rows = numbered_rows(10)
    small, large = Loader(rows, 2, 1, seed=0), Loader(rows, 4, 2, seed=0)
    large.resume(small.state(3), step=3)
    assert stream(small, 0, 3) + stream(large, 3, 5) == stream(small, 0, 11)
    again = Loader(rows, 1, 1, seed=0)
    again.resume(large.state(5), step=5)
    assert stream(again, 5, 9) == stream(small, 11, 13)
    with pytest.raises(UserError, match=r"step 0: .*before the first"):
        large.batch(0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            Loader(numbered_rows(6), 2, 1, seed=0),
            "rows was 5 .* is 6 now.*data that the run was started with",
        ),
        (
            Loader(pack([np.arange(20)], LENGTH), 2, 1, seed=0),
            "fingerprint was [0-9a-f]{64} .* [0-9a-f]{64} now",
        ),
        (Loader(numbered_rows(5), 2, 1, seed=7), "seed was 0 .* is 7 now"),
        (Loader(numbered_rows(5), 2, 1, seed=0, shuffle=False), "shuffle was True .* is False now"),
    ],
)
def test_other_data_or_another_order_is_refused(other, message):
    state = Loader(numbered_rows(5), 2, 1, seed=0).state(3)
    with pytest.raises(UserError, match=message):
        other.check_state(state)
    with pytest.raises(UserError, match=message):
        other.resume(state, 3)


def test_a_changed_shuffle_and_a_foreign_state_are_refused():
    loader = Loader(numbered_rows(5), 2, 1, seed=0)
    state = loader.state(3)
    with pytest.raises(UserError, match=r"next_rows was .*version of grain"):
        loader.check_state(state | {"next_rows": state["next_rows"][::-1]})
    with pytest.raises(UserError, match="lacks next_sample"):
        loader.check_state({"next_index": 5})


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_eval_batches_hold_every_row_once_and_fill_up_with_masked_rows(count):
    rows = numbered_rows(count)
    batches = eval_batches(rows, batch_rows=3)
    assert {np.shape(batch.tokens) for batch in batches} == {(3, LENGTH)} and len(batches) == -(-count // 3)
    for name in ("tokens", "labels", "mask", "positions", "segments"):
        together = np.concatenate([getattr(batch, name) for batch in batches])
        assert np.array_equal(together[:count], getattr(rows, name))
        assert not together[count:].any() and together.dtype == getattr(rows, name).dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": pack([], LENGTH)}, "nothing to learn in these 0 row"),
        ({"batch_rows": 0}, "batch_rows: found 0"),
        ({"micro_batches": -1}, "micro_batches: found -1"),
        ({"seed": -1}, "seed: found -1"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Loader(**({"rows": numbered_rows(2), "batch_rows": 1, "micro_batches": 1, "seed": 0} | arguments))


def test_eval_refuses_emptiness_too():
    with pytest.raises(UserError, match="nothing to learn"):
        eval_batches(pack([], LENGTH), 2)
    with pytest.raises(UserError, match="batch_rows: found 0"):
        eval_batches(numbered_rows(2), 0)
