"""The head on one GPU: time by the wall and memory, beside one that makes full logits and, where installed, Liger's.

``python benchmarks/gpu.py [--json PATH]`` takes 16384 tokens, hidden states of width 2048 (student) and 4096 (teacher)
and a vocabulary of 128256, all by flags, in bfloat16, and computes ``alpha T^2 KL + (1 - alpha) CE`` with its gradients
by

- ``naive``: JAX, the formula on full logits; spmd_distill: `FusedHead` in a shard body on one device;
- ``trl`` and ``liger``: torch, in a process before the others, if this environment has torch with CUDA and
  liger-kernel.

Measured are the memory that XLA plans beyond inputs and outputs, the most that the device ever held in a first call
(above what lay on it before), the median of ``--rounds`` calls by the wall after two warm ones, in turn, and the loss.
Where jax finds no GPU it says so, and the exit code is 0; it is 1 if our loss is not that of ``naive``. Nothing takes
longer than ``--seconds`` once it is compiled. ``--platform cpu --tokens 256 --vocab 4096 --student 64 --teacher 128``
walks the same path on a CPU, which measures nothing of interest.
"""

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from _head_problem import TEMPERATURE, Problem, add_flags, from_flags
from _report import OURS, Row, report

NAME = "gpu-head"
NAIVE = "naive jax"
TORCH = {"trl": "torch, TRL's GKD", "liger": "liger-kernel"}
LOSS_BAR = 0.01
"""Relative difference of our loss to the naive one, in bfloat16."""
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.set_defaults(tokens=16384, vocab=128256, student=2048, teacher=4096)
    parser.add_argument("--platform", default="gpu", choices=["gpu", "cpu"], help="cpu tries the program out")
    parser.add_argument("--chunk", type=int, help="tokens a chunk of our head")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the rounds of all heads together")
    parser.add_argument("--json", metavar="PATH", help="also as JSON; - is stdout")
    parser.add_argument("--torch-worker", choices=list(TORCH), help=argparse.SUPPRESS)
    options = parser.parse_args()
    problem = from_flags(options)
    if options.torch_worker:
        print(json.dumps(in_torch(options, problem)))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    try:
        device = jax.devices(options.platform)[0]
    except RuntimeError:
        print("jax finds no GPU here, so there is nothing to measure. (pip install 'jax[cuda13]' where there is one.)")
        return
    rows = [*torch_rows(options, problem), *jax_rows(options, problem, device)]
    raise SystemExit(not report(rows, options.json, f"The loss from hidden states on {device.device_kind}, bfloat16"))


def setting_of(problem: Problem) -> dict[str, Any]:
    return {"N": problem.tokens, "Ds": problem.student, "Dt": problem.teacher, "V": problem.vocab}


# JAX


def jax_rows(options: argparse.Namespace, problem: Problem, device: Any) -> Iterator[Row]:
    import jax
    from _head_jax_worker import ours
    from _hlo import memory

    from spmd_distill.head import FusedHead

    head = FusedHead(chunk=options.chunk) if options.chunk else FusedHead()
    arrays = jax.device_put((*inputs(problem), problem.mask("all")), device)
    calls: dict[str, Callable[[], Any]] = {}
    losses: dict[str, float] = {}
    with jax.default_device(device):
        # The smaller one first: a device's peak never falls.
        for library, step in ((OURS, functools.partial(ours, head)), (NAIVE, naive())):
            setting = setting_of(problem)
            began = time.perf_counter()
            try:
                compiled = jax.jit(step).lower(*arrays).compile()
                print(f"{library}: compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
                before = held(device)
                losses[library] = float(compiled(*arrays)[0])
            except jax.errors.JaxRuntimeError as error:
                yield Row.left_out(NAME, library, setting, str(error).split("\n")[0][:120])
                continue
            yield Row(
                NAME, library, setting, "planned beyond inputs and outputs", memory(compiled)["temp"] / GIB, "GiB"
            )
            if before is not None:
                peak = device.memory_stats()["peak_bytes_in_use"] - before
                yield Row(NAME, library, setting, "device's peak, outputs included", peak / GIB, "GiB")
            calls[library] = functools.partial(lambda f: jax.block_until_ready(f(*arrays)), compiled)
    for library, seconds in in_turn(calls, options.rounds, options.seconds).items():
        yield Row(NAME, library, setting_of(problem), "wall time, forward and backward", seconds * 1e3, "ms")
    if len(losses) == 2:
        apart = abs(losses[OURS] - losses[NAIVE]) / abs(losses[NAIVE])
        yield Row.at_most(NAME, OURS, setting_of(problem), "loss, apart from naive", apart, "", LOSS_BAR)


def naive() -> Any:
    """The formula on full logits, which are bfloat16 as models emit them; what is done with them is float32."""
    import jax
    import jax.numpy as jnp
    from _head_jax_worker import WEIGHTS, mean

    def loss(h_s: Any, w_s: Any, h_t: Any, w_t: Any, labels: Any, mask: Any) -> Any:
        z_s, z_t = ((h @ w.T).astype(jnp.float32) for h, w in ((h_s, w_s), (h_t, w_t)))
        log_s, log_t = (jax.nn.log_softmax(z / TEMPERATURE) for z in (z_s, z_t))
        kl = jnp.sum(jnp.exp(log_t) * (log_t - log_s), axis=-1)
        ce = -jnp.take_along_axis(jax.nn.log_softmax(z_s), labels[:, None], axis=-1)[:, 0]
        return mean(WEIGHTS[0] * kl + WEIGHTS[1] * ce, mask)

    return jax.value_and_grad(loss, argnums=(0, 1))


def inputs(problem: Problem) -> tuple[Any, ...]:
    """The problem's arrays in bfloat16; labels as they are."""
    import jax.numpy as jnp

    *floats, labels = problem.inputs()
    return *(x.astype(jnp.bfloat16) for x in floats), labels


def held(device: Any) -> int | None:
    """Bytes that lie on the device now, if it can tell."""
    stats = device.memory_stats()
    return stats["bytes_in_use"] if stats else None


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, float]:
    """The median wall time of each, called one after the other until the rounds or the seconds are over."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for i in range(rounds + 2):
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            if i >= 2:
                found[name].append(time.perf_counter() - before)
        if i >= 2 and time.perf_counter() - began > seconds:
            break
    return {name: statistics.median(times) for name, times in found.items()}


# torch


def torch_rows(options: argparse.Namespace, problem: Problem) -> Iterator[Row]:
    for head, library in TORCH.items():
        missing = [m for m in ("torch", "liger_kernel")[: 1 + (head == "liger")] if importlib.util.find_spec(m) is None]
        if missing:
            yield Row.left_out(NAME, library, setting_of(problem), f"{missing[0]} is not installed here")
            continue
        command = [sys.executable, __file__, f"--torch-worker={head}", *problem.as_flags()]
        command += [f"--{name}={getattr(options, name)}" for name in ("platform", "rounds", "seconds")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120 + options.seconds)
            found = json.loads(done.stdout.strip().splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            told = "too slow" if isinstance(error, subprocess.TimeoutExpired) else done.stderr.strip()[-120:]
            yield Row.left_out(NAME, library, setting_of(problem), told)
            continue
        for metric, (value, unit) in found.items():
            yield Row(NAME, library, setting_of(problem), metric, value, unit)


def in_torch(options: argparse.Namespace, problem: Problem) -> dict[str, tuple[float, str]]:
    """One of the torch heads: metric -> value and unit."""
    import torch
    from _head_torch_worker import liger, trl

    on = "cuda" if options.platform == "gpu" else "cpu"
    *floats, labels = (torch.from_numpy(x).to(on) for x in problem.inputs())
    h_s, w_s, h_t, w_t = (x.to(torch.bfloat16) for x in floats)
    del floats
    students, labels = [x.requires_grad_() for x in (h_s, w_s)], labels.long()
    head = trl if options.torch_worker == "trl" else liger(1024)

    def call() -> None:
        for x in students:
            x.grad = None
        head(h_s, w_s, h_t, w_t, labels).backward()
        if on == "cuda":
            torch.cuda.synchronize()

    found = {}
    if on == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        found["device's peak, outputs included"] = ((torch.cuda.max_memory_allocated() - before) / GIB, "GiB")
    (seconds,) = in_turn({"": call}, options.rounds, options.seconds / 3).values()
    return found | {"wall time, forward and backward": (seconds * 1e3, "ms")}


if __name__ == "__main__":
    main()
