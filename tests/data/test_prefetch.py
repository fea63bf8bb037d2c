"""Prefetching: the same batches in the same order, errors at their own step, and no thread left behind."""

import threading

import pytest

from spmd_distill.data import Prefetch


def threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_come_in_order_and_once(depth):
    asked = []
    with Prefetch(lambda step: asked.append(step) or step * 10, 3, 20, depth) as batches:
        assert [batches.get(step) for step in range(3, 20)] == [10 * step for step in range(3, 20)]
        assert batches.waited >= 0
    assert asked == list(range(3, 20)) and threads() == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_only_so_many_are_prepared_ahead(depth):
    made, ahead = [], threading.Event()

    def fetch(step):
        made.append(step)
        if step == 1 + depth:  # one is served, `depth` wait, and one more is in hand
            ahead.set()
        return step

    with Prefetch(fetch, 0, 100, depth) as batches:
        batches.get(0)
        assert ahead.wait(30)
        batches.get(1)
    assert max(made) <= depth + 3 and threads() == 0


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("error", [ValueError("row 7"), KeyboardInterrupt()])
def test_an_error_is_raised_at_the_step_that_it_belongs_to(depth, error):
    def fetch(step):
        if step == 2:
            raise error
        return step

    with Prefetch(fetch, 0, 9, depth) as batches:
        assert [batches.get(0), batches.get(1)] == [0, 1]
        with pytest.raises(type(error)) as found:
            batches.get(2)
        assert found.value is error
    assert threads() == 0


def test_leaving_early_ends_the_thread():
    with pytest.raises(RuntimeError, match="step failed"), Prefetch(lambda step: step, 0, 10**9, 2) as batches:
        batches.get(0)
        raise RuntimeError("step failed")
    assert threads() == 0
    Prefetch(lambda step: step, 5, 5, 2).close()


def test_steps_are_asked_for_in_their_order():
    with Prefetch(lambda step: step, 0, 3, 1) as batches, pytest.raises(AssertionError, match="asked for step 1"):
        batches.get(1)
