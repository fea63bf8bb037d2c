"""Mixtures: shares as weighed at every moment, every row of a source once an epoch, any sample at once."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_distill.data import Loader, Mixture, pack
from spmd_distill.data.rows.mixture import Order, integer_shares
from spmd_distill.errors import UserError

LENGTH = 4


def source(first: int, count: int):
    """Rows of a source whose first tokens are ``first``, ``first + 1``, ..."""
    return pack([np.array([first + i, 1, 2, 3]) for i in range(count)], LENGTH)


def mixture(*weights: float) -> Mixture:
    return Mixture({"a": source(100, 5), "b": source(200, 3), "c": source(300, 8)}, weights or None)


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    data=st.data(),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_shares_hold_at_every_moment_and_nothing_is_repeated_inside_an_epoch(sizes, data, seed, shuffle):
    weights = data.draw(st.lists(st.sampled_from([0.1, 1, 2, 5.5]), min_size=len(sizes), max_size=len(sizes)))
    order, count = Order(sizes, weights, seed, shuffle), 60
    rows = order.rows(0, count)
    offsets = np.cumsum([0, *sizes])
    taken = [int(np.searchsorted(offsets, row, side="right")) - 1 for row in rows]
    for n in (1, 7, 30, count):
        for number, weight in enumerate(weights):
            seen = taken[:n].count(number)
            assert abs(seen - n * weight / sum(weights)) <= len(sizes)
            assert order.epochs(n)[number] == seen / sizes[number]
    for number, size in enumerate(sizes):
        own = [row - offsets[number] for row, of in zip(rows, taken, strict=True) if of == number]
        for first in range(0, len(own) - size + 1, size):
            epoch = own[first : first + size]
            assert sorted(epoch) == list(range(size)) and (shuffle or epoch == sorted(epoch))
    assert order.rows(17, 9) == rows[17:26], "any sample is known at once"


def test_frequencies_are_those_of_the_weights_and_no_source_starves():
    order = Order([50, 3, 400], [1, 0.25, 1000], seed=0, shuffle=True)
    rows = np.array(order.rows(0, 10_005))
    seen = [int(np.sum((rows >= a) & (rows < b))) for a, b in ((0, 50), (50, 53), (53, 453))]
    assert seen[2] > 9980 and seen[0] in (9, 10, 11) and seen[1] in (2, 3)
    assert order.rows(10**12, 3) == order.rows(10**12, 3)


def test_sources_of_one_size_have_orders_of_their_own():
    rows = np.array(Order([40, 40], [1, 1], seed=0, shuffle=True).rows(0, 80))
    assert rows[rows < 40].tolist() != (rows[rows >= 40] - 40).tolist()


def test_without_weights_every_row_comes_once_an_epoch():
    loader = Loader(mixture(), 4, 1, seed=1)
    seen = Counter(int(t) for step in range(8) for t in loader.batch(step).tokens[0, :, 0])
    assert seen == {first + i: 2 for first, count in ((100, 5), (200, 3), (300, 8)) for i in range(count)}
    assert loader.epoch(4) == 1 and loader.epochs(4) == [1, 1, 1]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([1, 2], (1, 2)), ([0.1, 0.2, 0.7], (1, 2, 7)), ([50, 100], (1, 2)), ([1 / 3, 0.7], (3226, 6774)),
     ([1e-9, 1], (1, 10_000)), ([2.5], (1,))],
)  # fmt: skip
def test_weights_become_whole_numbers(weights, shares):
    assert integer_shares(weights) == shares


@pytest.mark.parametrize("weights", [(), (1, 2, 3)])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_rows_of_all_hosts_are_the_batch(weights, hosts):
    loader = Loader(mixture(*weights), batch_rows=8, micro_batches=3, seed=0)
    each = 8 // hosts
    for step in (0, 5):
        whole = loader.batch(step)
        parts = [loader.local(step, slice(host * each, (host + 1) * each)) for host in range(hosts)]
        scattered = loader.local(step, list(range(7, -1, -hosts)))
        for name in ("tokens", "labels", "mask", "positions", "segments"):
            together = np.concatenate([getattr(part, name) for part in parts], axis=1)
            assert np.array_equal(together, getattr(whole, name))
            assert np.array_equal(getattr(scattered, name), getattr(whole, name)[:, ::-1][:, ::hosts])


def test_a_host_puts_together_its_own_rows_alone(monkeypatch):
    rows, taken = mixture(1, 1, 1), []
    take = Mixture.take
    monkeypatch.setattr(Mixture, "take", lambda self, indices: taken.append(len(indices)) or take(self, indices))
    Loader(rows, 8, 2, seed=0).local(0, slice(2, 4))
    assert taken == [4]
    with pytest.raises(UserError, match="found 8 to 8, expected 0 to 7"):
        Loader(rows, 8, 2, seed=0).local(0, [8])


@pytest.mark.parametrize(("b", "a"), [(4, 1), (2, 3), (5, 1)])
def test_a_mixture_goes_on_on_any_number_of_hosts_and_with_any_batch(b, a):
    def samples(loader, first, last):
        return [int(t) for step in range(first, last) for t in loader.batch(step).tokens[..., 0].reshape(-1)]

    loader = Loader(mixture(1, 2, 0.5), 6, 1, seed=3)
    resumed = Loader(mixture(1, 2, 0.5), b, a, seed=3)
    resumed.resume(json.loads(json.dumps(loader.state(4))), step=4)
    went_on, never_stopped = samples(resumed, 4, 6), samples(loader, 4, 8)
    assert went_on == never_stopped[: len(went_on)]


def test_what_differs_is_named_by_its_source():
    state = Loader(mixture(1, 2, 3), 4, 1, seed=0).state(2)
    assert json.loads(json.dumps(state)) == state and all(not isinstance(v, dict) for v in state.values())
    with pytest.raises(UserError, match=r"b\.weight was 2 .* is 1 now"):
        Loader(mixture(1, 1, 3), 4, 1, seed=0).check_state(state)
    with pytest.raises(UserError, match=r"a\.weight was 1 .* is None now"):
        Loader(mixture(), 4, 1, seed=0).check_state(state)
    other = Mixture({"a": source(100, 5), "b": source(201, 3), "c": source(300, 8)}, [1, 2, 3])
    with pytest.raises(UserError, match=r"b\.fingerprint was .*give the data"):
        Loader(other, 4, 1, seed=0).check_state(state)


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ({}, None, "no sources"),
        ({"a": source(0, 1), "b": pack([], LENGTH)}, None, "'b' has no row"),
        ({"a": source(0, 1), "b": pack([np.arange(6)], 3)}, None, "one length"),
        ({"a": source(0, 1)}, [0.0], "weight 0.0"),
        ({"a": source(0, 1)}, [float("nan")], "weight nan"),
        ({"a": source(0, 1)}, [1, 2], "2 weight"),
    ],
)
def test_what_cannot_be_mixed_is_refused(parts, weights, message):
    with pytest.raises(UserError, match=message):
        Mixture(parts, weights)
