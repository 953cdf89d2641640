"""The core decides and does nothing else, and imports point downwards only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vertumnus

PACKAGE = Path(vertumnus.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# What would let the core read a clock, the environment or chance, or touch a socket, a process or a thread.
OUTSIDE_WORLD = {
    *("time", "datetime", "random", "secrets", "uuid"),
    *("os", "threading", "multiprocessing", "concurrent", "subprocess", "signal"),
    *("asyncio", "socket", "select", "selectors", "ssl", "http", "urllib"),
    *("torch", "click", "rich", "matplotlib"),
}

# Which layers a layer may import, itself included; a layer that is not listed may import all but the command line.
BELOW = {
    "errors": {"errors"},
    "core": {"core", "errors"},
    "workload": {"workload", "core", "errors"},
    "sim": {"sim", "workload", "core", "errors"},
    "engine": {"engine", "errors"},
    "serve": {"serve", "engine", "core", "errors"},
    "profiling": {"profiling", "serve", "engine", "workload", "core", "errors"},
    "demo": {"demo", "workload", "core", "errors"},
    "replay": {"replay", "workload", "core", "errors"},
    "validation": {"validation", "serve", "engine", "sim", "replay", "workload", "core", "errors"},
    "reproduction": {"reproduction", "bench", "sim", "workload", "core", "errors"},
}


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    """Absolute names of everything that a module imports anywhere in it, with the lines."""
    package = ["vertumnus", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "vertumnus":  # the names may be modules: `from vertumnus import cli`
                for alias in node.names:
                    yield f"vertumnus.{alias.name}", node.lineno
            else:
                yield module, node.lineno


def ids(paths):
    return [str(path.relative_to(PACKAGE)) for path in paths]


CORE = [path for path in MODULES if layer_of(path) == "core"]


@pytest.mark.parametrize("path", CORE, ids=ids(CORE))
def test_core_imports_nothing_of_the_outside_world(path):
    found = [f"{name} (line {line})" for name, line in imports_of(path) if name.split(".")[0] in OUTSIDE_WORLD]
    assert found == []


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_imports_point_downwards(path):
    layer = layer_of(path)
    found = []
    for name, line in imports_of(path):
        top, _, rest = name.partition(".")
        if top != "vertumnus":
            continue
        target = rest.split(".")[0]
        above = target == "cli" and layer not in ("cli", "__main__")
        if above or (layer in BELOW and target not in BELOW[layer]):
            found.append(f"{name} (line {line})")
    assert found == []


def test_core_imports_with_torch_and_sockets_blocked():
    # NumPy, SciPy and the standard library are loaded first: they may import what they like.
    code = """
import sys, pkgutil, importlib, importlib.resources
import numpy, scipy.optimize
for blocked in ("torch", "socket", "_socket", "ssl"):
    sys.modules[blocked] = None
import vertumnus.core
names = [module.name for module in pkgutil.walk_packages(vertumnus.core.__path__, "vertumnus.core.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == len([path for path in CORE if path.parent.name != "core" or path.stem != "__init__"])
