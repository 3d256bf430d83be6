"""`train` in notebook cells, run by a real kernel in local mode; the example runs first."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from raytrain_gpt.config.load import start_of
from raytrain_gpt.errors import ConfigError, TrainingFailed
from raytrain_gpt.notebook import TrainedRun
from tests.conftest import raises_line
from tests.data.shard_tools import prepare_here

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"
SMALL = "num_workers=0, num_layers=1, num_heads=1, embd_size=16, mlflow_uri=None, num_samples=0"


def test_importing_the_package_is_cheap() -> None:
    code = "import sys; from raytrain_gpt import train; print({'ray', 'torch', 'mlflow'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_curve_has_the_steps_of_its_metric() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 10, "train/loss": 3.25},
        {"step": 20, "val/loss": 3.5},
        {"step": 21, "train/loss": None},
    ]
    run = TrainedRun("runs/a", 21, "runs/a/c", None, 3.5, "runs/a/report.html", rows)
    assert run.curve("train/loss") == ([10], [3.25])
    with pytest.raises(KeyError, match=r"no metric loss \(available: .*val/loss"):
        run.curve("loss")
    assert "metrics" not in repr(run)


def test_a_preset_and_a_file_exclude_each_other(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {max_steps: 7}")
    assert start_of(None, file, {"seed"})[1].field_values()["run_name"] == "mine"
    with raises_line(ConfigError, "preset quickstart", str(file)):
        start_of("quickstart", file, {})


def test_an_error_of_the_users_is_shown_as_one_line() -> None:
    assert ConfigError("no")._render_traceback_() == ["ConfigError: no"]
    error = TrainingFailed("failed")
    error.__cause__ = ValueError("why")
    assert error._render_traceback_()[-2:] == ["ValueError: why", "TrainingFailed: failed"]


class Client(nbclient.NotebookClient):
    """Client that interrupts the kernel at the first step of a cell with "interrupted" in its code."""

    interrupt: asyncio.Task[None] | None = None

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        is_first = msg["msg_type"] == "stream" and self.interrupt is None
        if is_first and "interrupted" in cell.source and "| loss" in msg["content"]["text"]:
            self.interrupt = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(msg, cell, cell_index)


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """Return a client for the example in a directory with only a small version of the quickstart's data."""
    text = "".join(path.read_text("utf-8") for path in sorted(Path(__file__).parent.rglob("*.py")))
    (tmp_path / "text.txt").write_text(text, "utf-8")
    prepare_here([str(tmp_path / "text.txt")], tmp_path / "data/stdlib", "bytes", val_fraction=0.1)
    notebook = nbformat.read(EXAMPLE, as_version=4)
    for cell in notebook.cells:  # small, and in the kernel's process
        cell.source = cell.source.replace("train(run_name", f"train({SMALL}, run_name")
    return Client(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def result(cell: Any) -> str:
    return str(cell.outputs[-1].data["text/plain"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_example_trains_draws_samples_goes_on_and_is_interrupted(client: Client) -> None:
    add = [
        "train(max_step=5)",
        f"train(run_name='interrupted', max_steps=100_000, {SMALL})",
        f"train(run_name='interrupted', max_steps=1, {SMALL})",
    ]
    assert not any(cell.get("outputs") for cell in client.nb.cells)
    for source in add:
        client.nb.cells.append(nbformat.v4.new_code_cell(source))
    for cell in client.nb.cells[-3:-1]:
        cell.metadata["tags"] = ["raises-exception"]
    client.execute()

    codes = [cell for cell in client.nb.cells if cell.cell_type == "code"]
    first, plot, sample, second, wrong, interrupted, again = codes
    assert "finished at step 40 of 40" in printed(first)
    assert {output.name for output in first.outputs} == {"stdout"}
    assert "image/png" in plot.outputs[-1].data
    assert sample.outputs[0].text.startswith("def ")
    assert "step=60" in result(second)
    (error,) = wrong.outputs
    assert error.traceback == [
        "ConfigError: unknown configuration key max_step; did you mean max_steps?"
    ]
    (message,) = interrupted.outputs[-1].traceback
    found = re.match(
        r"Interrupted: interrupted at step (\d+), saved: \S+; run the same command", message
    )
    assert found, message
    assert f"step={found[1]}" in result(again), "the same kernel has the saved step"
