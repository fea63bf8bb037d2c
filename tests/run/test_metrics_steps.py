"""Numbers of steps on their way to lines: none is lost, none is looked at too early, and a clock that can stand."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_distill.metrics import Meter, Work
from spmd_distill.metrics.steplog import StepLog, metric_values
from spmd_distill.types import Mean


def left_by(step):
    """What step ``step`` leaves: a loss of ``step`` a token, on 10 * step tokens."""
    count = jnp.int32(10 * step)
    return {"loss": Mean(jnp.float32(10.0 * step * step), count), "grad_norm": Mean(jnp.float32(step), jnp.int32(1))}


def drive(steps, ends=(), **settings):
    log, seen = StepLog(Meter(), **settings), []
    for step in range(1, steps + 1):
        log.meter.start()
        seen.append((step, log.add(step, left_by(step))))
        if step in ends or step == steps:
            seen.append((step, log.settle()))
    return log, seen


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("ends", [(), (4,), (3, 7)])
def test_lines_pool_all_steps_and_every_step_is_seen_once(every, lag, ends):
    log, seen = drive(11, ends, every=every, lag=lag)
    steps = [s for _, found in seen for s in found]
    assert [s.step for s in steps] == list(range(1, 12))
    assert all(s.values["loss"] == s.step and s.values["grad_norm"] == s.step for s in steps)
    assert log.tokens == sum(10 * k for k in range(1, 12))
    lines = [s for s in steps if s.line is not None]
    assert [s.step for s in lines] == sorted({k for k in range(1, 12) if k % every == 0} | {11, *ends})
    first = 1
    for s in lines:
        among = np.arange(first, s.step + 1)
        assert s.line["loss"] == pytest.approx((10.0 * among**2).sum() / (10 * among).sum())
        assert s.line["grad_norm"] == pytest.approx(among.mean())
        assert s.line["tokens"] == s.tokens == 5 * s.step * (s.step + 1)
        first = s.step + 1


def test_a_step_is_looked_at_when_the_next_one_runs():
    _, seen = drive(4, lag=1)
    assert [(at, [s.step for s in found]) for at, found in seen] == [(1, []), (2, [1]), (3, [2]), (4, [3]), (4, [4])]
    _, seen = drive(8, lag=1, every=3)
    assert [at for at, found in seen if found] == [2, 4, 7, 8]
    _, seen = drive(8, every=3, look=1)
    assert [at for at, found in seen if found] == [*range(1, 9)]


def test_a_loss_that_is_no_number_ends_the_line():
    log = StepLog(Meter(), every=10)
    log.add(1, left_by(1))
    log.add(2, {"loss": Mean(jnp.float32(np.nan), jnp.int32(5))})
    log.add(3, left_by(3))
    two, three = log.settle()
    assert np.isnan(two.line["loss"]) and three.line["loss"] == 3


def test_averages_of_nothing_and_perplexities():
    found = metric_values({"loss": Mean(jnp.float32(3), jnp.int32(0)), "ce_student": Mean(np.float32(4), np.int32(2))})
    assert found == {"loss": 0.0, "ce_student": 2.0, "perplexity_student": pytest.approx(np.exp(2))}


def test_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    meter = Meter(Work(flops=6e12, peak=8e12))

    def step(seconds, wait, tokens):
        meter.start()
        with meter.waiting():
            now[0] += wait
        now[0] += seconds - wait
        meter.count(tokens)

    step(50, 0, 10)
    meter.restart()  # it warmed up
    step(2, 0.5, 10)
    step(4, 1.0, 50)
    assert meter.lap() == {"tokens_per_second": 10, "flops_per_second": 2e12, "mfu": 0.25, "data_wait": 0.25}
    meter.stop()
    now[0] += 1000  # an evaluation
    step(10, 0, 20)
    assert meter.lap() == {"tokens_per_second": 2, "flops_per_second": 6e11, "mfu": 0.075, "data_wait": 0}
    assert meter.lap() == {} and meter.tokens_per_second == 5
    assert Meter().tokens_per_second == 0
    bare = Meter()
    bare.start()
    now[0] += 1
    bare.count(3)
    assert bare.lap() == {"tokens_per_second": 3, "data_wait": 0}, "what is not known is not said"
