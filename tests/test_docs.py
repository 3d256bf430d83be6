"""The documentation names only files, functions, tests and headings that exist."""

from __future__ import annotations

import argparse
import ast
import re
from functools import cache
from pathlib import Path
from textwrap import indent

import pytest

import raytrain_gpt
from raytrain_gpt import cli
from raytrain_gpt.config.kinds import BUILT_IN

from .test_layers import ORDER

PACKAGE = Path(raytrain_gpt.__file__).parent
ROOT = PACKAGE.parent
TESTS = ROOT / "tests"

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
HISTORY = {"CHANGELOG.md", "docs/notebook/decisions.md"}
"""Dated pages, whose names were correct at the time."""
CURRENT = [page for page in PAGES if page.relative_to(ROOT).as_posix() not in HISTORY]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
"""Pages for readers: all but the notebook."""
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
NOT_MODULES = {"data/order_hash", "data/stdlib", "train/loss"}
"""Metric keys and data paths that look like modules."""

MODULE = re.compile(rf"(?<![\w/.])({'|'.join(ROOMS)})/(\w+)(?:\.(?!py\b)(\w+))?(?![\w/=])")
TEST = re.compile(r"(?<![\w.])(?:tests/)?((?:\w+/)*test_\w+)(?:\.py)?(?:::(test_\w+))?")
PATH = re.compile(r"`((?:raytrain_gpt|tests|benchmarks|examples|clusters)/[\w./-]+)`")
LINK = re.compile(
    r"""\]\(([^)\s]+)\)          # [text](target), ![text](target)
    | ^\[[^\]]+\]:\s+(\S+)      # [name]: target
    | <img\ [^>]*src="([^"]+)" """,
    re.MULTILINE | re.VERBOSE,
)
CODE = re.compile(r"^ {4}[^\n]*$|^```.*?^```$", re.MULTILINE | re.DOTALL)

COMMAND = re.compile(r"(?:raytrain-gpt|python (?=train\.py)) ?([a-z]\w*)(?:\.py)?([^`#|\n]*)")
"""Command, and the rest of its line."""


@cache
def names_of(file: Path) -> frozenset[str]:
    found = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, spelled as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings)


def links_of(page: Path) -> list[str]:
    """Return the targets of a page's links and images, except in code."""
    text = CODE.sub("", page.read_text("utf-8"))
    return ["".join(groups) for groups in LINK.findall(text)]


def by_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def modules_named(page: Path) -> list[tuple[str, str, str]]:
    """Return (room, module, name in it or empty) of all text that looks like a module.

    On the architecture page all text counts. Elsewhere `data/web` and `runs/book` are directories of users,
    so only text in backquotes counts, and the rooms `data` and `runs` are ignored.
    """
    text = page.read_text("utf-8")
    if page.name == "architecture.md":
        found = MODULE.findall(text)
    else:
        quoted = re.findall(r"`([^`\n]+)`", text)
        found = [m.groups(default="") for q in quoted if (m := MODULE.fullmatch(q))]
        found = [
            (room, module, name) for room, module, name in found if room not in ("data", "runs")
        ]
    return [
        (room, module, name)
        for room, module, name in found
        if f"{room}/{module}" not in NOT_MODULES and not module.startswith("test_")
    ]


@pytest.mark.parametrize("page", CURRENT, ids=by_name)
def test_modules_that_are_named_exist(page: Path) -> None:
    missing = []
    for room, module, name in modules_named(page):
        file = PACKAGE / room / f"{module}.py"
        if not file.is_file() or (name and name not in names_of(file)):
            missing.append(f"{room}/{module}" + (f".{name}" if name else ""))
    assert not missing


def test_the_readme_quotes_the_training_loop() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    (quoted,) = re.findall(r"^```python\n(for step in .*?)^```$", text, re.MULTILINE | re.DOTALL)
    source = (PACKAGE / "core" / "loop.py").read_text("utf-8")
    assert f"\n{indent(quoted, ' ' * 4)}\n\n" in source


def test_the_layers_of_the_architecture_are_those_that_are_tested() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = text[text.index("| layer, from the top") :].split("\n\n")[0]
    rows = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in table.splitlines()[2:]]
    modules = [layer for layer in ORDER if not any(name.startswith("__") for name in layer)]
    assert rows == modules[::-1]


@pytest.mark.parametrize("page", CURRENT, ids=by_name)
def test_tests_and_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    for module, test in TEST.findall(text):
        file = TESTS / f"{module}.py"
        if "/" not in module and not file.is_file():
            continue  # the name of a test, checked with its file
        if not file.is_file() or (test and test not in names_of(file)):
            missing.append(f"tests/{module}.py" + (f"::{test}" if test else ""))
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in links_of(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    assert not broken


def test_the_readme_links_every_page_and_the_notebook() -> None:
    links = {link.partition("#")[0] for link in links_of(ROOT / "README.md")}
    assert {f"docs/{page.name}" for page in GUIDES} <= links
    assert any(link.startswith("docs/notebook/") for link in links)


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OF_EXAMPLES = {
    f"--{name}" for file in EXAMPLES for name in re.findall(r"(?m)^    (\w+): ", file.read_text())
}
"""Flags for the settings of the examples of --code."""


def test_the_page_on_extending_has_the_examples_as_they_stand() -> None:
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    shown = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    for file in EXAMPLES:
        is_shown = file.read_text("utf-8").rstrip() in shown
        assert is_shown or f"(../examples/{file.name})" in page, file.name


def parsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands or actions."""
    choices = [one.choices for one in parser._actions if isinstance(one.choices, dict)]
    return choices[0] if choices else {}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    below = [flags_of(one) for one in parsers_of(parser).values()]
    return {*parser._option_string_actions}.union(*below)


@pytest.mark.parametrize("page", CURRENT, ids=by_name)
def test_commands_that_are_named_have_these_flags(page: Path) -> None:
    flags = {name: flags_of(parser) for name, parser in parsers_of(cli._parser(BUILT_IN)).items()}
    text = re.sub(r"\\\n\s*", "", page.read_text("utf-8"))
    unknown = [
        f"{command} {flag}"
        for command, rest in COMMAND.findall(text)
        for flag in [*re.findall(r"--[a-z]\w*", rest), "--help"]
        if flag not in flags.get(command, ()) and flag not in OF_EXAMPLES
    ]
    assert not unknown
