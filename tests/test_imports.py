"""Who may import whom. Read from the source, so that a lazy import deep in a function counts as well."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"fusewire.daemon": ROOT / "daemon", "fusewire.model": ROOT / "model"}
CORE = {
    "fusewire.daemon.books",
    "fusewire.daemon.errors",
    "fusewire.daemon.events",
    "fusewire.daemon.holdings",
    "fusewire.daemon.ledger",
    "fusewire.daemon.lifecycle",
    "fusewire.daemon.progress",
    "fusewire.daemon.records",
    "fusewire.daemon.reload",
    "fusewire.daemon.rollout",
    "fusewire.daemon.roster",
    "fusewire.daemon.settings",
    "fusewire.daemon.shard",
    "fusewire.daemon.stimuli",
    "fusewire.daemon.versions",
    "fusewire.daemon.wire",
}
"""The pure modules: no clock, path, socket or tensor in their decisions."""
PURE_STDLIB = sys.stdlib_module_names - {
    "asyncio",
    "fcntl",
    "mmap",
    "multiprocessing",
    "pickle",
    "queue",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
}


class Import(NamedTuple):
    """One import statement."""

    module: str
    line: int
    lazy: bool
    """Inside a function: not executed when the module is imported."""


def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything that is ours."""
    found: dict[str, Path] = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports(source: str, name: str, *, package: bool) -> Iterator[Import]:
    """Yield what a module imports, with absolute names; ``from a import b`` as ``a.b`` if that is one."""
    tree = ast.parse(source)
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) in lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: len(name.split(".")) - node.level + package]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in MODULES else base, node.lineno, id(node) in lazy)


def imports_of(name: str) -> list[Import]:
    path = MODULES[name]
    return list(imports(path.read_text(), name, package=path.name == "__init__.py"))


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def closure(name: str) -> dict[str, str]:
    """Everything that importing a module imports -> the module of ours that asks for it."""
    found = {name: name}
    todo = [name]
    while todo:
        module = todo.pop()
        parents = [module.rsplit(".", depth)[0] for depth in range(1, module.count("."))]
        wanted = [item.module for item in imports_of(module) if not item.lazy] + parents
        for item in wanted:
            if item not in found:
                found[item] = module
                if item in MODULES:
                    todo.append(item)
    return found


@pytest.mark.parametrize(
    ("source", "name", "package", "expected"),
    [
        ("from . import wire", "fusewire.daemon.client", False, "fusewire.daemon.wire"),
        ("from .wire import Put", "fusewire.daemon.client", False, "fusewire.daemon.wire"),
        ("from .errors import X", "fusewire.daemon", True, "fusewire.daemon.errors"),
        ("from fusewire.daemon import wire", "fusewire.model", True, "fusewire.daemon.wire"),
        ("from fusewire import daemon", "fusewire.model.names", False, "fusewire.daemon"),
        ("import torch.nn as nn", "fusewire.model", True, "torch.nn"),
        ("if True:\n    import torch", "fusewire.model", True, "torch"),
    ],
)
def test_the_reader_of_imports(source: str, name: str, package: bool, expected: str) -> None:
    (found,) = imports(source, name, package=package)

    assert (found.module, found.lazy) == (expected, False)


def test_the_reader_of_imports_sees_lazy_ones() -> None:
    (found,) = imports("def f():\n    import torch", "fusewire.model", package=True)

    assert (found.module, found.lazy) == ("torch", True)


def offences(name: str, allowed: frozenset[str] | set[str]) -> list[str]:
    """Return the imports of a module of ours that are neither its own package's nor allowed."""
    return [
        f"{MODULES[name].relative_to(ROOT)}:{item.line} imports {item.module}"
        for item in imports_of(name)
        if item.module not in allowed and item.module.partition(".")[0] not in allowed
    ]


def test_model_imports_torch_numpy_the_standard_library_and_itself() -> None:
    """Above all not the daemon: the model is of use without it."""
    own = {name for name in MODULES if inside(name, "fusewire.model")}
    assert len(own) > 5

    found = [
        offence
        for name in sorted(own)
        for offence in offences(name, own | sys.stdlib_module_names | {"torch", "numpy"})
    ]

    assert found == []


def test_core_is_pure() -> None:
    assert sorted(CORE - set(MODULES)) == []

    found = [offence for name in sorted(CORE) for offence in offences(name, CORE | PURE_STDLIB | {"msgspec"})]

    assert found == []


def test_nothing_unpickles() -> None:
    """Bytes from outside are never code: no pickle, and no call that is one in disguise."""
    banned = re.compile(r"eval|exec|(torch|np|numpy)\.load|.*\.(recv|send)_pyobj")
    found = []
    for name, path in MODULES.items():
        found += [f"{name}: {item.module}" for item in imports_of(name) if item.module in {"pickle", "marshal"}]
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        found += [f"{name}:{call.lineno}" for call in calls if banned.fullmatch(ast.unparse(call.func))]

    assert found == []


def test_importing_the_client_imports_neither_torch_nor_the_model() -> None:
    found = {
        module: asker
        for module, asker in closure("fusewire.daemon.client").items()
        if inside(module, "torch") or inside(module, "fusewire.model")
    }

    assert found == {}


def test_the_client_can_be_imported_where_torch_is_missing() -> None:
    code = "import sys; sys.modules['torch'] = None; import fusewire.daemon.client"

    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)

    assert (result.returncode, result.stderr) == (0, "")


def test_ours_are_imported_as_fusewire() -> None:
    """``daemon`` and ``model`` would be other people's: python-daemon's, and a trainer's own model.py."""
    found = [
        f"{path.relative_to(ROOT)}:{item.line} imports {item.module}"
        for folder in ("daemon", "model", "tests", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for item in imports(path.read_text(), "outside.module", package=False)
        if item.module.partition(".")[0] in {"daemon", "model"}
    ]

    assert found == []


def test_nothing_of_ours_is_importable_at_top_level() -> None:
    code = (
        "import importlib.util as u\n"
        "for name in ('daemon', 'model'):\n"
        "    spec = u.find_spec(name)\n"
        "    print(name, spec and spec.origin, spec and list(spec.submodule_search_locations or ()))"
    )

    result = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True, timeout=60)

    assert str(ROOT) not in result.stdout


def test_fusewire_is_a_namespace() -> None:
    """A file there would have to belong to one of the two packages, and the other would not be found."""
    assert not (ROOT / "fusewire").exists()
    assert sorted(path.name for path in (ROOT / "typings/fusewire").iterdir()) == ["daemon", "model"]
