"""The shape of the source: imports go one way, plan/ is pure, importing is light, a public name has one meaning, and
modules hold no state. Sizes are not tested: `sizes.py` reports them."""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "weightstream"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE
FILES = sorted(SOURCE.rglob("*.py"))

# Files that rooms below their own may import, since these files know nothing of their room.
LEAVES = {"errors", "plan.manifest", "plan.units", "codec.format", "measure.progress"}
# The rooms that a room may import besides itself. A room that is not in the table is not part of the design.
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "plan.manifest": {"errors"},
    "plan.units": set(),
    "codec.format": {"errors"},
    "measure.progress": set(),
    "settings": {"errors"},
    "plan": {"errors", "settings", "codec.format"},
    "codec": {"errors"},
    "store": {"errors", "codec", "plan.units"},
    "runtime": {"errors", "settings", "plan", "codec", "store"},
    "measure": {"errors", "settings", "plan", "codec", "store", "runtime"},
    "adapters": {"errors", "settings", "plan", "codec", "store", "runtime", "measure.progress"},
    "inputs": {"errors", "settings", "plan", "codec", "store", "runtime", "measure", "adapters"},
    "api": {"errors", "settings", "plan", "codec", "store", "runtime", "measure", "adapters", "inputs"},
    "": {"errors", "settings", "plan", "runtime", "adapters", "api"},
    "text": {"errors", "store", "runtime", "adapters", "api"},
    "serving": {"errors", "runtime", "text"},
    "integrations": {"errors", "settings", "plan", "store", "runtime", "adapters", "api", ""},
    "cli": {"errors", "settings", "plan", "runtime", "measure", "adapters", "api", "text", "serving", ""},
    "__main__": {"cli"},
}
# The same within rooms that have rooms of their own.
INSIDE: dict[str, dict[str, set[str]]] = {
    "runtime": {
        "trace": set(),
        "tensors": set(),
        "devices": {"tensors"},
        "weights": {"tensors", "devices"},
        "experts": {"trace", "tensors", "devices", "weights"},
        "ring": {"trace", "tensors", "devices", "weights", "experts"},
        "streamer": {"trace", "tensors", "devices", "weights", "experts", "ring"},
    },
    "adapters": {
        "hf": set(),
        "modules": {"hf"},
        "steps": {"hf"},
        "generation": {"hf", "modules", "steps"},
        "tracing": {"hf", "steps"},
        "diffusers": {"hf", "modules", "steps", "generation", "tracing"},
    },
}
FILES_IN_ROOT, FILES_IN_ROOM = 4, 19
# Public names that several modules define with one meaning, and where; every other name is defined once.
SHARED_NAMES: dict[str, set[str]] = {
    # the same function of the format: in plain torch, in Triton and its launch, and the choice between them
    "encode": {"codec.coding", "codec.kernels", "codec.reference", "codec.triton_codec"},
    "decode": {"codec.coding", "codec.kernels", "codec.reference"},
    "histograms": {"codec.reference", "codec.triton_codec"},
    # a command of the command line, and the function that it calls
    "pack": {"api.pack", "cli.pack"},
}
# Names that a library or a convention requires in each module.
CONVENTIONAL_NAMES = {"logger"}

PURE = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "statistics",
    "types",
}
PURE |= {"operator", "re", "typing", "pydantic", PACKAGE}
IMPURE_BUILTINS = {"open", "print", "input", "exec", "eval", "__import__"}

MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "ChainMap"}
MUTABLE_CALLS |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "SimpleNamespace", "count", "cycle"}
MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
# (file, name): names that pydantic requires, the session tables of the operators, and the backends of models that are
# in use or garbage. These belong to the process. Nothing else.
ALLOWED_STATE = {
    ("settings/config.py", "_Settings.model_config"),
    ("adapters/modules/moe.py", "_EQUAL"),
    ("adapters/hf/packed_matrices.py", "_EQUAL"),
}
ALLOWED_STATE |= {("runtime/streamer/custom_ops.py", name) for name in ("_UNITS", "_HANDLES")}
ALLOWED_STATE |= {("runtime/devices/opening.py", "_LEFT")}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def module_of(path: Path) -> str:
    """`weightstream.plan.schedule`, or the package's own name for an `__init__.py`."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth of the code. `from package import module` imports that module."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def own_imports(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] == PACKAGE}


def part_of(module: str) -> str:
    inside = module.removeprefix(PACKAGE).removeprefix(".")
    return inside if inside in LEAVES else inside.split(".")[0]


def below(part: str) -> set[str]:
    """Everything below a part. A room comes with its leaves, and its own leaves are below its other files."""
    return BELOW[part] | {leaf for leaf in LEAVES if leaf.split(".")[0] in BELOW[part] | {part}} - {part}


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def test_source_is_found() -> None:
    assert {f"{PACKAGE}.plan.schedule", f"{PACKAGE}.runtime.ring.engine", PACKAGE} <= MODULES
    assert own_imports(SOURCE / "plan" / "check.py") >= {f"{PACKAGE}.plan.plan", f"{PACKAGE}.errors"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(module_of(path))
    assert part in BELOW, f"{relative(path)} belongs to no part of the design"
    for name in own_imports(path):
        assert name in MODULES, f"{relative(path)} imports {name}, which is not a module"
        allowed = below(part) | {part}
        assert part_of(name) in allowed, f"{relative(path)} imports {name}; it may import {sorted(allowed)}"


@pytest.mark.parametrize("path", [path for room in INSIDE for path in (SOURCE / room).rglob("*.py")], ids=relative)
def test_imports_go_one_way_within_a_room(path: Path) -> None:
    room, _, inside = module_of(path).removeprefix(PACKAGE + ".").partition(".")
    if not inside:  # the docstring of the room
        assert not own_imports(path)
        return
    part = inside.split(".")[0]
    assert part in INSIDE[room], f"{relative(path)} belongs to no room of {room}"
    for name in own_imports(path):
        if name.startswith(f"{PACKAGE}.{room}."):
            allowed = INSIDE[room][part] | {part}
            assert name.split(".")[2] in allowed, f"{relative(path)} imports {name}; it may import {sorted(allowed)}"


def test_no_part_is_above_and_below_another() -> None:
    for table in ({part: below(part) for part in BELOW}, *INSIDE.values()):
        for part, others in table.items():
            assert not [other for other in others if part in table[other]]


def test_rooms_are_small() -> None:
    """A reader cannot find anything in a folder of many files."""
    for folder in {path.parent for path in FILES}:
        files = [path.name for path in folder.iterdir() if path.is_file()]
        assert len(files) <= (FILES_IN_ROOT if folder == SOURCE else FILES_IN_ROOM), f"{relative(folder)}: {files}"


def test_room_init_files_hold_only_a_docstring() -> None:
    for path in FILES:
        if path.name == "__init__.py" and path.parent not in (SOURCE, SOURCE / "cli"):
            assert len(tree(path).body) == 1, f"{relative(path)} holds more than a docstring"


def test_no_module_imports_itself_through_others() -> None:
    graph = {module_of(path): own_imports(path) - {module_of(path)} for path in FILES}
    while graph:
        free = [module for module, needs in graph.items() if not needs & graph.keys()]
        assert free, f"import cycle among {sorted(graph)}"
        for module in free:
            del graph[module]


def public_names(body: list[ast.stmt]) -> Iterator[str]:
    """Classes, functions, aliases and constants that a module defines, also in branches. Imports are not
    definitions."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            names = [each.id for each in stored if isinstance(each.ctx, ast.Store)]
        else:
            names = []
            for inner in ("body", "orelse", "finalbody"):
                yield from public_names(getattr(node, inner, []))
        yield from (name for name in names if not name.startswith("_"))


def test_a_public_name_has_one_meaning() -> None:
    homes: dict[str, set[str]] = {}
    for path in FILES:
        for name in public_names(tree(path).body):
            if name not in CONVENTIONAL_NAMES:
                homes.setdefault(name, set()).add(module_of(path).removeprefix(PACKAGE).removeprefix("."))
    shared = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert shared == SHARED_NAMES


def test_public_names_of_a_module_are_found() -> None:
    source = "a = b, _c = 1, 2\nd: int = 3\nif a:\n    def e(): f = 1\nclass G:\n    h = 1\ni[0] = j.k = 1\nimport l"
    assert list(public_names(ast.parse(source).body)) == ["a", "b", "d", "e", "G"]


PLAN_FILES = [path for path in FILES if path.parent.name == "plan"]


@pytest.mark.parametrize("path", PLAN_FILES, ids=relative)
def test_planning_imports_no_torch_no_files_and_no_clock(path: Path) -> None:
    assert {name.split(".")[0] for name in imports(path)} <= PURE
    for node in nodes(path):
        if isinstance(node, ast.Name) and node.id in IMPURE_BUILTINS:
            assert hasattr(builtins, node.id)
            raise AssertionError(f"{relative(path)}:{node.lineno} calls {node.id}")


def spells_torch_cuda(path: Path) -> list[int]:
    lines = []
    for node in nodes(path):
        if (
            (isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch")
            or (isinstance(node, ast.Import) and any(a.name.startswith("torch.cuda") for a in node.names))
            or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"))
            or (isinstance(node, ast.ImportFrom) and node.module == "torch" and "cuda" in {a.name for a in node.names})
        ):
            lines.append(node.lineno)
    return lines


def test_torch_cuda_is_spelled_in_one_file() -> None:
    assert {relative(path) for path in FILES if spells_torch_cuda(path)} == {"runtime/devices/cuda.py"}


def containers(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, int]]:
    """Names that a module, or a class of it, binds to a mutable container at import."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from containers(node.body, f"{owner}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for inner in ("body", "orelse", "finalbody"):
                yield from containers(getattr(node, inner, []), owner)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and is_mutable(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and target.id != "__all__":
                    yield owner + target.id, node.lineno


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in MUTABLE_CALLS
    return isinstance(value, MUTABLE_NODES)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_modules_hold_no_state(path: Path) -> None:
    """Constant tables must be tuples, frozensets or MappingProxyTypes."""
    found = [(name, line) for name, line in containers(tree(path).body) if (relative(path), name) not in ALLOWED_STATE]
    assert not found, f"{relative(path)}: {found}"
    rebound = [node.lineno for node in nodes(path) if isinstance(node, ast.Global)]
    assert not rebound, f"{relative(path)}: `global` in lines {rebound}"


def test_mutable_state_is_found() -> None:
    source = "a = {}\nb: list[int] = []\nif a:\n    c = set()\nclass D:\n    e = weakref.WeakSet()\nf = (1,)\ng.h = []"
    assert [name for name, _ in containers(ast.parse(source).body)] == ["a", "b", "c", "D.e"]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_first_line_of_a_file_says_what_it_owns(path: Path) -> None:
    first = (ast.get_docstring(tree(path)) or "").split("\n")[0]
    assert first.endswith((".", "?")), f"{relative(path)} begins with {first!r}"


def run_python(code: str) -> str:
    """The output of a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


LOADED = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"


def test_planning_does_not_import_torch() -> None:
    """Report the first module that does."""
    each = [f"import {module}; print('{module}', end=' '); {LOADED}" for module in sorted(map(module_of, PLAN_FILES))]
    lines = run_python("\n".join(each)).splitlines()
    assert len(lines) == len(PLAN_FILES)
    for module, *loaded in map(str.split, lines):
        assert PACKAGE in loaded
        assert not {"torch", "transformers", "numpy", "rich"}.intersection(loaded), module


def test_importing_is_light_and_every_public_name_exists() -> None:
    """Access all names, so that names made on first use count too. None of them may initialise CUDA."""
    assert not {"transformers", "diffusers", "rich", "typer"}.intersection(
        run_python(f"import weightstream; {LOADED}").split()
    )
    loaded = run_python(
        "import torch\n"
        "def initialise(*_): raise SystemExit('CUDA was initialised')\n"
        "torch.cuda._lazy_init = initialise\n"
        "import weightstream\n"
        "for name in weightstream.__all__: assert getattr(weightstream, name).__name__ == name\n"
        "assert not torch.cuda.is_initialized()\n" + LOADED
    ).split()
    assert PACKAGE in loaded
    assert not {"transformers", "diffusers", "rich", "typer"}.intersection(loaded)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    code = "import weightstream\ntry: weightstream.offlaod\nexcept AttributeError as error: print(error)"
    assert run_python(code) == "module 'weightstream' has no attribute 'offlaod'"


def test_public_names_are_sorted_and_unique() -> None:
    names = next(
        ast.literal_eval(node.value)
        for node in tree(SOURCE / "__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert names == sorted(set(names))
    assert {"offload", "from_pretrained", "Plan", "Streamer", "OffloadConfig", "WeightstreamError"} <= set(names)
