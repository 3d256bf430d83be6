"""Fault table of docs/notebook/faults.md, made from the `fault` markers of tests.

Run `python -m tests.fault_table` to print it. A test may have several markers. Tests of the same fault use
the same name, and at least one of them states the outcome.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def faults_of(file: Path) -> list[tuple[str, ...]]:
    """Return the arguments of the markers `@pytest.mark.fault(fault[, outcome])` in a file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    found.append(tuple(ast.literal_eval(argument) for argument in mark.args))
    return found


def fault_table() -> str:
    """Return a Markdown table of faults in alphabetical order, with outcome and test files."""
    outcomes: dict[str, str] = {}
    files: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        name = f"`{file.relative_to(TESTS).with_suffix('').as_posix()}`"
        for fault, *outcome in faults_of(file):
            if outcome and outcomes.setdefault(fault, outcome[0]) != outcome[0]:
                raise ValueError(
                    f"{fault!r} has two outcomes: {outcomes[fault]!r} and {outcome[0]!r}"
                )
            tests = files.setdefault(fault, [])
            tests += [name] if name not in tests else []
    if missing := files.keys() - outcomes.keys():
        raise ValueError(f"no outcome for {sorted(missing)}")
    rows = [
        f"| {fault} | {outcomes[fault]} | {', '.join(files[fault])} |"
        for fault in sorted(files, key=str.lower)
    ]
    return "\n".join(["| fault | outcome | tests |", "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(fault_table(), end="")
