"""The rows of a batch that each process of a group makes: together, and where they are put, they are the batch."""

import jax
import numpy as np
import pytest

from spmd_distill.data import Loader, pack
from spmd_distill.distributed.arrays import held_rows, part_of, place_rows
from spmd_distill.mappers import MAPPERS, make_mapper
from spmd_distill.sharding import layout_names

A, B, L = 2, 8, 6
LOADER = Loader(pack([10 * i + np.arange(L) for i in range(24)], L), B, A, seed=3)


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", layout_names(8))
def test_what_the_processes_hold_is_the_batch(layout, processes):
    """Devices are numbered process by process; where a layout has copies of a row, several processes make it."""
    mapper = make_mapper("shard_map", layout)
    sharding = mapper.shardings(mapper.layout.spec((None, "batch", None)))
    groups = np.array_split(np.array(mapper.devices), min(processes, len(mapper.devices)))
    held = [held_rows(sharding, (A, B, L), group) for group in groups]
    assert sorted({row for rows in held for row in rows}) == list(range(B))
    shards = mapper.layout.batch_shards
    assert all(len(rows) <= B * max(1, -(-shards // len(groups))) // shards for rows in held)
    for step in (0, 5):
        whole = LOADER.batch(step)
        for group, rows in zip(groups, held, strict=True):
            mine = LOADER.local(step, rows)
            for name in ("tokens", "labels", "mask", "positions", "segments"):
                x, wanted = getattr(mine, name), getattr(whole, name)
                assert x.shape == (A, len(rows), L)
                for device, index in sharding.devices_indices_map((A, B, L)).items():
                    if device in group:
                        np.testing.assert_array_equal(part_of(x, rows, B, index), wanted[index])


@pytest.mark.parametrize("mapper", [m for m in MAPPERS if m != "vmap"])
def test_the_rows_of_all_devices_are_all_rows_and_lie_where_they_should(mapper):
    mapping = make_mapper(mapper, "dp4_tp2")
    sharding = mapping.shardings(mapping.layout.spec((None, "batch", None)))
    rows, batch = held_rows(sharding, (A, B, L)), LOADER.batch(1)
    assert rows == list(range(B))
    placed = place_rows(batch, jax.tree.map(lambda _: sharding, batch), rows, B)
    assert placed.tokens.sharding == sharding
    np.testing.assert_array_equal(placed.tokens, batch.tokens)
