"""Dependencies point one way, from the command line down to the errors; see ORDER."""

from __future__ import annotations

import ast
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import raytrain_gpt

ROOT = Path(raytrain_gpt.__file__).parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

ORDER = (
    {"redact", "version"},
    {"errors"},
    {"format", "parsing"},
    {"columns"},
    {"config"},
    {"storage"},
    {"data", "core"},
    {"cluster", "events"},
    {"checkpoint"},
    {"ingest", "trackers"},
    {"runs"},
    {"evaluate"},
    {"train"},
    {"export", "replays", "sweep"},
    {"doctor", "scaling"},
    {"estimate"},
    {"extend"},
    {"commands", "notebook"},
    {"cli"},
    {"__init__"},
)
"""Layers from lowest to highest; each may import lower layers, but none of the same level."""

BELOW = {
    name: {below for lower in ORDER[:level] for below in lower}
    for level, names in enumerate(ORDER)
    for name in names
}
BELOW["export"] = BELOW["export"] - {"train"}  # a checkpoint is used without training

FORBIDDEN = {
    "redact": {"ray", "mlflow", "torch", "numpy", "pydantic"},
    "version": {"ray", "mlflow", "torch", "numpy", "pydantic"},
    "errors": {"ray", "mlflow", "torch", "numpy", "pydantic"},
    "format": {"ray", "mlflow", "torch", "numpy", "pydantic"},
    "parsing": {"ray", "mlflow", "torch", "numpy", "pydantic"},
    "columns": {"ray", "mlflow", "torch", "numpy", "pydantic"},
    "config": {"ray", "mlflow", "torch"},
    "storage": {"ray", "mlflow", "torch"},
    "data": {"ray", "mlflow", "torch"},
    "core": {"ray", "mlflow"},
}
"""Layer -> packages it may not import."""


def layer(module: str) -> str:
    """Return the layer of a module: `data` for `data/order.py` and `raytrain_gpt.data.order`."""
    return module.removeprefix("raytrain_gpt.").removesuffix(".py").split("/")[0].split(".")[0]


@cache
def imports(module: str, at_import_only: bool = False) -> frozenset[str]:
    """Return the dotted names of all imports in a module, at any level.

    Args:
        module: Path below the package.
        at_import_only: Skip imports inside functions and under TYPE_CHECKING.
    """
    skipped = (ast.FunctionDef, ast.AsyncFunctionDef) if at_import_only else ()
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse((ROOT / module).read_text("utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, skipped):
            continue
        if at_import_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ["raytrain_gpt", *Path(module).parts[:-1]]
            base = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{name}.{alias.name}" for alias in node.names}
            names |= {name} - {"raytrain_gpt"}  # a module of it, or a name of its `__init__`
    return frozenset(names)


def file_of(name: str) -> str | None:
    """Return the module's path below the package, or None if it is not one of our modules.

    Names of the package itself, such as `raytrain_gpt.train`, are in its `__init__.py`.
    """
    package, *parts = name.split(".")
    if package != "raytrain_gpt":
        return None
    path = "/".join(parts)
    found = [f for f in (f"{path}.py", f"{path}/__init__.py") if f in MODULES]
    return found[0] if found else "__init__.py" if len(parts) < 2 else None


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_the_layers_below_it(module: str) -> None:
    ours = layer(module)
    assert ours in BELOW, f"{module} belongs to no layer; add it to ORDER"
    files = {name: file_of(name) for name in imports(module)}
    for name, file in files.items():
        if file is not None:
            assert layer(file) in BELOW[ours] | {ours}, f"{module} imports {name}"


def test_no_modules_import_each_other_and_none_the_package() -> None:
    """Imports inside functions and under TYPE_CHECKING count."""
    files = {module: {file_of(name) for name in imports(module)} for module in MODULES}
    assert [module for module, imported in files.items() if "__init__.py" in imported] == []
    TopologicalSorter({m: imported - {m, None} for m, imported in files.items()}).prepare()


@pytest.mark.parametrize("module", [m for m in MODULES if layer(m) in FORBIDDEN])
def test_the_lower_layers_know_nothing_of_the_tools_above_them(module: str) -> None:
    packages = {name.split(".")[0] for name in imports(module)}
    assert not packages & FORBIDDEN[layer(module)]


@pytest.mark.parametrize("module", ["space", "spec", "trial_plan"])
def test_a_sweep_file_is_read_without_ray_and_torch(module: str) -> None:
    names = imports(f"sweep/{module}.py")
    assert not {name.split(".")[0] for name in names} & {"ray", "mlflow", "torch"}
    files = {file_of(name) for name in names} - {None}
    assert {layer(str(file)) for file in files} <= {
        "sweep",
        "config",
        "columns",
        "errors",
        "format",
    }


@pytest.mark.parametrize(
    ("process", "among"),
    [
        ("ingest/ray_dataset", {"data/order.py", "data/reader.py", "errors.py"}),
        ("train/mailbox", {"events.py", "core/spikes.py"}),
        ("cluster/all_nodes", {"storage/location.py"}),
    ],
)
def test_processes_that_compute_nothing_start_without_torch(process: str, among: set[str]) -> None:
    todo, seen = ["__init__.py", f"{layer(process)}/__init__.py", f"{process}.py"], set()
    while todo:
        module = todo.pop()
        seen.add(module)
        names = imports(module, at_import_only=True)
        assert not {name for name in names if name.split(".")[0] == "torch"}, module
        files = {file_of(name) for name in names} - seen
        packages = {f"{layer(file)}/__init__.py" for file in files if file and "/" in file}
        todo += [file for file in files | packages - seen if file is not None]
    assert among <= seen


def installed_with(
    name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]
) -> None:
    """Add a distribution and all its dependencies, as pip installs them, to `seen`."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # for a different system or Python
        return
    for needed in map(Requirement, lines):
        if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras or {""}):
            installed_with(canonicalize_name(needed.name), frozenset(needed.extras), seen)


def needed_distributions() -> set[str]:
    """Return the names of all distributions that this one is installed with."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))["project"]
    seen: set[tuple[str, frozenset[str]]] = set()
    for needed in map(Requirement, project["dependencies"]):
        installed_with(canonicalize_name(needed.name), frozenset(needed.extras), seen)
    return {name for name, _ in seen}


def test_packages_that_are_imported_are_installed_with_this_one() -> None:
    needed = needed_distributions()
    imported = {name.split(".")[0] for module in MODULES for name in imports(module)}
    providers = packages_distributions()
    missing = {
        package
        for package in imported - {*sys.stdlib_module_names, "raytrain_gpt"}
        if needed.isdisjoint(map(canonicalize_name, providers.get(package, ())))
    }
    assert missing == {"trackio", "transformers", "wandb"}  # where they are installed


def test_the_demo_installs_the_pinned_runtime_and_no_more() -> None:
    text = (ROOT.parent / "constraints.txt").read_text("utf-8").partition("# Extras")[0]
    pinned = {canonicalize_name(line.split("==")[0]) for line in text.splitlines() if "==" in line}
    installed = {canonicalize_name(d.name) for d in distributions()}
    needed_here = needed_distributions() & installed
    assert {name for name in needed_here - pinned if not name.startswith(("nvidia-", "cuda-"))} <= {
        "triton"
    }
    assert pinned & installed <= needed_here
