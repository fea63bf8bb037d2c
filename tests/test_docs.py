"""The documentation does what it says: its code runs, its figures are counted, its commands and quotations exist."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tokenizers import pre_tokenizers

import spmd_distill as sd
from spmd_distill import cli
from spmd_distill.config import parse_config
from spmd_distill.state import abstract_state

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^<!-- (?P<kind>run|file: (?P<name>\S+)) -->\n```\w+\n(?P<text>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A marked block of code: a file to write (``name``), or Python to run (None)."""

    name: str | None
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    markdown = page.read_text()
    found = list(BLOCK.finditer(markdown))
    assert len(found) == len(re.findall(r"^<!-- (?:run|file:)", markdown, re.M)), f"{page.name}: a marker without code"
    return [Block(m["name"], m["text"], markdown[: m.start("text")].count("\n")) for m in found]


# ---------------------------------------------------------------------------------------------------------------------
# Code


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
def test_code_on_the_page_runs(page, tmp_path, monkeypatch):
    """Blocks of a page share a folder and a namespace; the folder holds the tiny ``teacher.gguf`` and a ``text/``.

    The README's run is not made, its settings are read: the quickstart makes such a run.
    """
    if page.name == "README.md":
        monkeypatch.setattr("spmd_distill.train.distil", lambda config: {"kl_before": 2.0, "kl_after": 1.0})
    monkeypatch.setenv("SPMD_DISTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if "teacher.gguf" in page.read_text():
        write_teacher(tmp_path / "teacher.gguf")
        write_text(tmp_path / "text")
    before = set(sys.modules)
    script = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", script)
    try:
        for block in blocks(page):
            if block.name is not None:
                Path(block.name).write_text(block.text)
                sys.modules.pop(Path(block.name).stem, None)  # of another test in this process
            else:
                code = "\n" * block.line + block.text  # so that a traceback names the line of the page
                exec(compile(code, str(page), "exec"), script.__dict__)
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
                del sys.modules[name]


def write_text(folder: Path) -> None:
    folder.mkdir()
    for i in range(12):
        random = np.random.default_rng(i)
        words = ["".join(random.choice(list("aeinorst"), random.integers(2, 8))) for _ in range(150)]
        (folder / f"{i}.txt").write_text(" ".join(words))


def write_teacher(path: Path) -> None:
    """A Llama of 16 tiny layers with a byte-level tokenizer: one special token, 256 bytes, "th"."""
    layers, width, mlp, heads, kv_heads, vocab = 16, 32, 48, 4, 2, 258
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": layers, "context_length": 256, "embedding_length": width, "feed_forward_length": mlp,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "vocab_size": vocab,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"])
    writer.add_array("tokenizer.ggml.token_type", [3] + [1] * 257)
    writer.add_array("tokenizer.ggml.merges", ["t h"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, width), "output_norm": (width,)}
    kv_width = width // heads * kv_heads
    for i in range(layers):
        shapes |= {
            f"blk.{i}.{name}": shape
            for name, shape in {
                "attn_norm": (width,), "attn_q": (width, width), "attn_k": (kv_width, width),
                "attn_v": (kv_width, width), "attn_output": (width, width), "ffn_norm": (width,),
                "ffn_gate": (mlp, width), "ffn_up": (mlp, width), "ffn_down": (width, mlp),
            }.items()
        }  # fmt: skip
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else random.normal(size=shape) * 0.2
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def table(page: str, marker: str) -> list[list[str]]:
    """The cells of the rows under ``<!-- marker -->``."""
    text = (ROOT / "docs" / page).read_text()
    _, found, after = text.partition(f"<!-- {marker} -->\n")
    assert found, f"{page}: no table marked {marker}"
    rows = after.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(
    ("layout", "remat", "forward", "backward"),
    [[row[0].strip("`"), *row[1:]] for row in table("sharding.md", "counted")],
    ids=lambda x: x if x.isidentifier() else "",
)
def test_collectives_a_layer_are_as_many_as_the_page_says(layout, remat, forward, backward):
    sizes = {"vocab_size": 100, "width": 16, "heads": 8, "kv_heads": 8, "head_dim": 2, "mlp": 32}
    student = sd.decoder(sd.DecoderConfig(layers=5, remat=remat, **sizes))
    teacher = sd.decoder(sd.DecoderConfig(layers=3, **sizes))
    mapper = sd.make_mapper("shard_map", sd.MeshLayout.load(layout))
    run = sd.Distillation(student, sd.OnlineTeacher(teacher), sd.Objective.mix(sd.ForwardKL()), mapper)
    tx = optax.sgd(0.1)
    ids = jax.ShapeDtypeStruct((1, 8, 16), jnp.int32)
    batch = sd.Batch(ids, ids, jax.ShapeDtypeStruct(ids.shape, bool), ids, ids)
    program = jax.make_jaxpr(run.train_step(tx))(abstract_state(run, tx), teacher.abstract, batch)
    found = [said(counted(body, mapper.layout.sizes)) for body in scans(program.jaxpr, length=5)]
    assert found == [forward, backward]
    teachers = [said(counted(body, mapper.layout.sizes)) for body in scans(program.jaxpr, length=3)]
    assert teachers == [forward]


def scans(jaxpr: Any, length: int) -> list[Any]:
    """The bodies of all scans of so many trips, in the order of the program."""
    found = []
    for equation, inner in nested(jaxpr):
        if equation.primitive.name == "scan" and equation.params["length"] == length:
            found.append(inner)
        else:
            found += scans(inner, length)
    return found


def counted(jaxpr: Any, sizes: dict[str, int]) -> Counter[str]:
    """Collectives by "kind axis", where the axis has more than one shard."""
    kinds = {"psum_invariant": "psum", "psum": "psum", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name in kinds:
            axes = equation.params.get("axes") or equation.params["axis_name"]
            for axis in (axes,) if isinstance(axes, str) else axes:
                found[f"{kinds[equation.primitive.name]} {axis}"] += sizes[axis] > 1
        else:
            assert not re.search("all_to_all|permute|gather_inv|pm(ax|in|ean)", equation.primitive.name), equation
    for _, inner in nested(jaxpr):
        found += counted(inner, sizes)
    return found


def nested(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """(equation, jaxpr in its parameters), one level down."""
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                yield equation, value


def said(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items()) if number)


def test_every_message_explained_is_one_of_the_code():
    source = "".join(path.read_text() for path in sorted((ROOT / "spmd_distill").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # sentences that are broken over lines
    quoted = [part for row in table("sharding.md", "messages") for part in re.findall("`([^`]+)`", row[0])]
    assert len(quoted) > 15
    assert not [part for part in quoted if part not in source]


def test_the_layers_are_those_of_the_layering_test():
    listed = re.search(r"^LAYERS = \((.*?)^\)$", (ROOT / "tests/core/test_layering.py").read_text(), re.M | re.S)
    assert listed
    order = re.findall(r'"(\w+)"', listed[1])
    design = (ROOT / "docs/design.md").read_text().partition("| Row | Modules |")[2]
    shown = [re.findall(r"`(\w+)`", row.split("|")[2]) for row in design.splitlines()[2:] if row.startswith("|")]
    existing = {path.stem for path in (ROOT / "spmd_distill").iterdir() if not path.name.startswith("__p")}
    assert sorted(name for row in shown for name in row) == sorted(existing)
    below: set[str] = set()
    for row in shown:
        assert all(order.index(name) > order.index(lower) for name in row for lower in below)
        below |= set(row)


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "## Layouts"), ("docs/sharding.md", "## Built-in layouts")]
)
def test_every_layout_is_in_the_table(page, heading):
    section = (ROOT / page).read_text().partition(heading)[2].partition("\n## ")[0]
    first_cells = "".join(row.split("|")[1] for row in section.splitlines() if row.startswith("|"))
    assert sorted(re.findall(r"`(\w+)`", first_cells)) == sd.layout_names()


# ---------------------------------------------------------------------------------------------------------------------
# Links and commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize(("page", "heading"), [("README.md", "## Documentation"), ("docs/index.md", "| Read | for |")])
def test_every_page_is_listed_once(page, heading):
    text = (ROOT / page).read_text().partition(heading)[2].partition("\n## ")[0]
    pages = sorted(path.name for path in ROOT.glob("docs/*.md") if path.name != "index.md")
    folder = "docs/" if page == "README.md" else ""
    assert sorted(re.findall(rf"\]\({folder}([a-z-]+\.md)\)", text)) == pages


def test_the_readme_has_the_two_commands_that_ci_looks_for():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci/run").read_text()
    patterns = re.findall(r'^\w+_command=\$\(from_readme "(.*)"\)$', ci, re.M)
    assert len(patterns) == 2
    assert [len(re.findall(pattern, readme, re.M)) for pattern in patterns] == [1, 1]


def test_the_commands_on_the_pages_are_understood():
    """Every ``spmd-distill`` line in a block of commands goes through the command's own parser."""
    parser, seen = cli.build_parser(), 0
    for page in PAGES:
        for block in re.findall(r"^```(?:bash|text)\n(.*?)^```$", page.read_text(), re.M | re.S):
            for line in re.findall(r"(?:^|&& )spmd-distill (\w.*)$", block, re.M):
                options, rest = parser.parse_known_args(shlex.split(line))
                assert getattr(options, "takes_settings", False) or not rest, line
                if rest:
                    parse_config(rest)
                seen += 1
    assert seen >= 8
