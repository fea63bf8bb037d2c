"""The page about optimizers holds the bytes of every optimizer's state, and its run files are taken."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import optax
import pytest
import yaml

from spmd_distill.config import OptimizerConfig, PrecisionConfig, parse_config
from spmd_distill.models import DecoderConfig, decoder
from spmd_distill.optimizer import build_rule, build_schedule
from spmd_distill.optimizer.moments import MOMENTS
from spmd_distill.optimizer.named import MASKS, REFUSED, accepted, find_optimizer, optimizer_names

PAGE = (Path(__file__).parents[2] / "docs/optimizers.md").read_text()
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
LLAMA = decoder(
    DecoderConfig(vocab_size=128256, width=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp=8192)
)  # Llama 3.2 1B; nothing of it is ever held
State = Literal["float32", "bfloat16", "int8"]
STATES: tuple[State, ...] = get_args(State)
NEEDED = {"noisy_sgd": {"eta": 0.01, "gamma": 0.5, "key": 0}}
VARIANTS = {"`sgd` with `momentum`": ("sgd", {"momentum": 0.9})}

as_known = pytest.mark.skipif(optax.__version__ != "0.2.8", reason="the page lists the optimizers of optax 0.2.8")


def bytes_a_parameter(name: str, options: dict[str, Any], state: State) -> str:
    """Of the optimizer's own state, with two decimals; a dash where the state may not be rounded."""
    if state != "float32" and name not in MOMENTS:
        return "-"
    config = OptimizerConfig(name=name, options=options, state=state)
    rule = build_rule(config, PrecisionConfig(), build_schedule(config, 10), LLAMA)
    shapes = jax.eval_shape(lambda params: rule.start(params, 0), LLAMA.abstract)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.opt_state))
    return f"{held / sum(x.size for x in jax.tree.leaves(LLAMA.abstract)):.2f}"


def wanted_table() -> str:
    """Optimizers of the same bytes share a row."""
    rows = defaultdict(list)
    plain = {f"`{name}`": (name, NEEDED.get(name, {})) for name in optimizer_names()}
    for said, (name, options) in (plain | VARIANTS).items():
        rows[tuple(bytes_a_parameter(name, options, state) for state in STATES)].append(said)
    lines = ["| Optimizer | float32 | bfloat16 | int8 |", "|---|---|---|---|"]
    for cells in sorted(rows, key=lambda cells: (float(cells[0]), cells[1:])):
        lines.append(f"| {', '.join(sorted(rows[cells]))} | {' | '.join(cells)} |")
    return "\n".join(lines)


@as_known
def test_the_bytes_of_every_optimizer_are_on_the_page():
    found = PAGE.partition("<!-- computed -->\n")[2].partition("\n\n")[0]
    assert found == wanted_table()


@as_known
def test_the_optimizers_with_a_decay_and_a_mask_are_on_the_page():
    def masked(name: str) -> bool:
        known = accepted(find_optimizer(name)) or ()
        return any(mask in known for mask in MASKS) and ("weight_decay" in known or "weight_decay_rate" in known)

    listed = re.search(r"are decayed by 0.01 unless said otherwise: (.*?)\. ", " ".join(PAGE.split()))
    assert listed
    assert re.findall(r"`(\w+)`", listed[1]) == [name for name in optimizer_names() if masked(name)]


def test_what_is_refused_is_on_the_page():
    listed = re.search(r"Refused: (.*?)\. ", " ".join(PAGE.split()))
    assert listed
    assert re.findall(r"`(\w+)`", listed[1]) == sorted(REFUSED)


@pytest.mark.parametrize("text", SNIPPETS, ids=lambda text: " ".join(yaml.safe_load(text)["optimizer"]))
def test_run_files_on_the_page_make_an_update(text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    config = parse_config(path=tmp_path / "run.yaml")
    build_rule(config.optimizer, config.precision, build_schedule(config.optimizer, config.steps), LLAMA)
