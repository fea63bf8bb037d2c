"""The house's floors, held against the imports: who may import whom, and what may be named only in one file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "spmd_distill"
ROOT = PACKAGE.name
MAX_FAN_OUT = 12

LAYERS = (
    ("errors", "types", "runtime"),
    ("config", "launcher"),
    ("collectives", "sharding", "distributed"),
    ("mappers", "divergences"),
    ("head", "models"),
    ("features",),
    ("interop", "teachers", "objective", "optimizer", "assets"),
    ("data", "bodies"),
    ("step",),
    ("program",),
    (
        "state",
        "checkpoint",
        "metrics",
        "progress",
        "environment",
        "runfolder",
        "guards",
        "generation",
        "loading",
        "testing",
        "classes",
    ),
    ("pretrained", "compose", "corpus", "resuming"),
    ("prune",),
    ("student",),
    ("build",),
    ("scoring", "saving", "finish", "samples", "fitting", "pairing"),
    ("loop",),
    ("train", "proof", "runs", "report", "doctor"),
    ("cli", "__init__"),
    ("__main__",),
)
"""Modules and packages right under the root, from the ground up; each may import only what stands before its row."""

COLLECTIVES = """
    all_gather all_gather_invariant all_to_all axis_index axis_size pbroadcast pcast pmax pmean pmin ppermute pshuffle
    psum psum_scatter pswapaxes pvary ragged_all_to_all
""".split()  # noqa: SIM905


class Source:
    """One file: its dotted name below the root ("" for the root's own ``__init__``), and what it names."""

    def __init__(self, package: Path, path: Path):
        parts = path.relative_to(package).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.room = self.name.split(".")[0] or "__init__"
        self.tree = ast.parse(path.read_text(), str(path))

    def imported(self, modules: set[str], root: str) -> set[str]:
        """Modules of this library that the file imports, functions' own imports included."""
        found = set()
        for module, name in self.imports():
            if module.split(".")[0] != root:
                continue
            inside = module.removeprefix(root).removeprefix(".")
            whole = f"{inside}.{name}".strip(".") if name else inside
            found.add(whole if whole in modules else inside)
        return found - {self.name}

    def imports(self) -> Iterator[tuple[str, str]]:
        """(absolute module, name taken from it or "") of every import statement."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    home = [ROOT, *self.name.split(".")] if self.name else [ROOT]
                    module = ".".join(home[: len(home) + self.is_package - node.level] + [module] * bool(module))
                yield from ((module, alias.name) for alias in node.names)

    def names(self) -> Iterator[str]:
        """Everything of another library that the file names, dotted and with its import aliases undone."""
        alias_of = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                alias_of |= {a.asname: a.name for a in node.names if a.asname}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                alias_of |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        yield from alias_of.values()
        yield from (module for module, _ in self.imports())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                parts = []
                while isinstance(node, ast.Attribute):
                    parts.append(node.attr)
                    node = node.value
                if isinstance(node, ast.Name):
                    yield ".".join([alias_of.get(node.id, node.id), *reversed(parts)])

    def calls(self) -> Iterator[str]:
        """Plain names that the file calls."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield node.func.id


def complaints(package: Path, layers: tuple[tuple[str, ...], ...] = LAYERS, root: str = ROOT) -> list[str]:
    sources = [Source(package, path) for path in sorted(package.rglob("*.py"))]
    graph = {s.name: s.imported({s.name for s in sources}, root) for s in sources}
    floor = {room: i for i, rooms in enumerate(layers) for room in rooms}
    found = []
    for source in sources:
        shown = source.name or "__init__"
        if source.room not in floor:
            found.append(f"{shown}: in no layer")
            continue
        for other in sorted(graph[source.name]):
            room = other.split(".")[0] or "__init__"
            if room != source.room and floor.get(room, 0) >= floor[source.room]:
                found.append(f"{shown}: imports {other or '__init__'}, which is not below it")
        if len(graph[source.name]) > MAX_FAN_OUT:
            found.append(f"{shown}: imports {len(graph[source.name])} modules")
        names = set(source.names())
        if source.room != "collectives":
            hits = {n for n in names if n.startswith("jax.lax.") and n.split(".")[2] in COLLECTIVES}
            found += [f"{shown}: names {n}" for n in sorted(hits)]
        if source.room != "sharding":
            hits = {n for n in names if n == "jax.P" or n.endswith(".PartitionSpec")}
            found += [f"{shown}: names {n}" for n in sorted(hits)]
            if "Spec" in source.calls():
                found.append(f"{shown}: writes a Spec")
        if any(n.startswith("jax._src") for n in names):
            found.append(f"{shown}: names jax._src")
    return found + [f"cycle: {' -> '.join(cycle)}" for cycle in cycles(graph)]


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One cycle for each edge that closes one, by depth-first search."""
    found, done, path = [], set(), []

    def visit(node: str) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
        elif node not in done:
            path.append(node)
            for other in sorted(graph.get(node, ())):
                visit(other)
            done.add(path.pop())

    for node in sorted(graph):
        visit(node)
    return found


def test_the_library_keeps_its_layers():
    assert not complaints(PACKAGE)


def test_every_layered_name_is_listed_once():
    rooms = [room for rooms in LAYERS for room in rooms]
    assert len(rooms) == len(set(rooms))


CLEAN = {
    "__init__.py": "from spmd_distill.step import Step as Step",
    "errors.py": "",
    "collectives.py": "from jax import lax\nlax.psum(1, 'data')",
    "sharding.py": "from jax.sharding import PartitionSpec\nPartitionSpec()",
    "mappers/__init__.py": "from spmd_distill.mappers.one import x",
    "mappers/one.py": "from spmd_distill.mappers.base import y\nfrom spmd_distill.sharding import Spec\nx: Spec",
    "mappers/base.py": "from spmd_distill import errors, collectives\nfrom jax import lax\nlax.scan",
    "step.py": "import spmd_distill.mappers\nimport jax\njax.lax.fori_loop",
    "cli.py": "from spmd_distill import step",
}


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({}, None),
        ({"sharding.py": "from spmd_distill.step import x"}, "sharding: imports step, which is not below it"),
        ({"sharding.py": "def f():\n    from spmd_distill import cli"}, "sharding: imports cli, which is not below it"),
        ({"sharding.py": "from . import collectives"}, "sharding: imports collectives, which is not below it"),
        ({"step.py": "import spmd_distill"}, "step: imports __init__, which is not below it"),
        ({"mappers/base.py": "from ..step import x"}, "mappers.base: imports step, which is not below it"),
        ({"lost.py": ""}, "lost: in no layer"),
        ({"lost/base.py": ""}, "lost.base: in no layer"),
        ({"mappers/base.py": "from spmd_distill.mappers import x"}, "cycle: mappers -> mappers.one -> mappers.base"),
        ({"mappers/base.py": "from .one import x"}, "cycle: mappers.one -> mappers.base -> mappers.one"),
        ({f"mappers/m{i}.py": "" for i in range(13)}
         | {"step.py": "from spmd_distill.mappers import " + ", ".join(f"m{i}" for i in range(13))},
         "step: imports 13 modules"),
        ({"step.py": "import jax\njax.lax.psum(1, 'data')"}, "step: names jax.lax.psum"),
        ({"step.py": "from jax import lax as l\nl.axis_index('data')"}, "step: names jax.lax.axis_index"),
        ({"step.py": "import jax.lax as l\nf = l.pcast"}, "step: names jax.lax.pcast"),
        ({"step.py": "from jax.lax import all_gather as g"}, "step: names jax.lax.all_gather"),
        ({"step.py": "from jax.sharding import PartitionSpec as P"}, "step: names jax.sharding.PartitionSpec"),
        ({"step.py": "import jax\njax.sharding.PartitionSpec()"}, "step: names jax.sharding.PartitionSpec"),
        ({"step.py": "from jax import P"}, "step: names jax.P"),
        ({"step.py": "from spmd_distill.sharding import Spec\nSpec('data')"}, "step: writes a Spec"),
        ({"step.py": "from jax._src import core"}, "step: names jax._src"),
        ({"step.py": "import jax\njax._src.core"}, "step: names jax._src"),
    ],
)  # fmt: skip
def test_the_checker_sees_every_violation(tmp_path, broken, complaint):
    for name, text in (CLEAN | broken).items():
        path = tmp_path / ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = complaints(tmp_path / ROOT)
    if complaint is None:
        assert not found
    else:
        assert any(line.startswith(complaint) for line in found), found
