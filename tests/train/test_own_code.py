"""Runs with the user's code: kept with checkpoints, compared on resume, and never executed unless named."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Catalog, Checkpoint
from raytrain_gpt.checkpoint.code_check import check_same_code
from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.errors import CheckpointError, ConfigError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.launch import train
from tests.conftest import RunCli, raises_line
from tests.made_runs import MakeConfig, steps
from tests.training import thread_ranks

OWN = """
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.extend import Field, Settings, architecture, schedule

class InverseSqrtSettings(Settings):
    inv_steps: int = Field(5, ge=1)
    '''Steps until the rate falls.'''

@schedule("inverse_sqrt", InverseSqrtSettings)
def inverse_sqrt(step, max_steps, settings):
    return (settings.inv_steps / max(settings.inv_steps, step)) ** 0.5

@schedule("broken")
def broken(step, max_steps, settings):
    return float("nan") if step == 12 else 1.0

@architecture("mine")
class Mine(GPT2):
    pass
"""
OTHER = OWN.replace("0.5", "0.4")
SCHEDULE = {"schedule": "inverse_sqrt", "inv_steps": 7, "max_steps": 20}
Start = Callable[..., Any]


@pytest.fixture
def start(make_config: MakeConfig) -> Start:
    """Return a function that runs with a text as its code, or without."""

    def begin(
        text: str | None,
        log: Callable[[str], None] = print,
        may_differ: bool = False,
        **fields: Any,
    ) -> Any:
        code = None if text is None else Code("my.py", text, may_differ)
        fields["storage_path"] = str(fields["storage_path"])
        return train(make_config(code, **fields), log)

    return begin


def newest(run_dir: Location) -> Checkpoint:
    return Catalog(run_dir).complete()[-1]


@pytest.mark.slow
def test_code_of_a_schedule_sets_the_rate_and_is_kept_with_checkpoints(
    start: Start, tmp_path: Path
) -> None:
    whole = start(OWN, run_name="own-schedule", storage_path=tmp_path, **SCHEDULE)
    rates = [row["optim/lr"] for row in steps(whole.run_dir)]
    warm_up = [1e-3 * step / 5 for step in range(1, 6)]
    after = [1e-3 * (7 / max(7, step)) ** 0.5 for step in range(5, 20)]
    assert rates == pytest.approx(warm_up + after)
    checkpoint = newest(whole.run_dir)
    assert (whole.run_dir / CODE_FILE).read_text() == OWN
    assert CODE_FILE in checkpoint.file_names
    assert checkpoint.state.code_sha256 == Code("", OWN).sha256
    (checkpoint.path / CODE_FILE).write_text(OTHER)
    with raises_line(CheckpointError, "the content of code.py was changed"):
        checkpoint.verify()


@pytest.mark.slow
def test_one_changed_byte_is_refused_with_ways_out_that_work(start: Start, tmp_path: Path) -> None:
    fields = {"run_name": "changed", "storage_path": tmp_path, **SCHEDULE}
    run = start(OWN, **fields)
    before, after = Code("", OWN).sha256, Code("", OTHER).sha256
    fields["max_steps"] = 30
    words = [f"other code (code {before[:12]} -> {after[:12]}, 1 line added, 1 removed", CODE_FILE]
    with raises_line(CheckpointError, *words, "--accept_changed_code"):
        start(OTHER, **fields)
    lines: list[str] = []
    start(OTHER, lines.append, may_differ=True, **fields)
    assert any(f"code {before[:12]} -> {after[:12]}" in line for line in lines)
    state = newest(run.run_dir).state
    assert (state.code_sha256, state.replaced_code) == (after, (before,))


@pytest.mark.slow
def test_code_from_which_no_kind_comes_may_not_change_either(start: Start, tmp_path: Path) -> None:
    """It is executed too. Remarks cannot act; the user may accept other code, and none."""
    fields: dict[str, Any] = {"run_name": "unused", "storage_path": tmp_path}
    start(OWN, max_steps=10, **fields)
    lines: list[str] = []
    start(f"# a remark\n{OWN}", lines.append, max_steps=20, **fields)
    assert any("changed since that checkpoint: code" in line for line in lines)
    for text in (OTHER, None):
        with raises_line(CheckpointError, "has other code", "--accept_changed_code"):
            start(text, max_steps=30, **fields)
    assert start(OTHER, may_differ=True, max_steps=30, **fields).step == 30
    assert start("", may_differ=True, max_steps=40, **fields).step == 40
    assert newest(Location.of(tmp_path / "unused")).state.code_sha256 is None
    with raises_line(CheckpointError, "has other code", "leave out --code"):
        start(OWN, max_steps=50, **fields)


@pytest.mark.slow
def test_a_rate_that_is_not_finite_ends_the_run_with_one_line(start: Start, tmp_path: Path) -> None:
    words = ["schedule broken returned nan at step 12 of 20", "finite factor"]
    with raises_line(ConfigError, *words):
        start(OWN, run_name="nan", storage_path=tmp_path, schedule="broken", max_steps=20)
    assert newest(Location.of(tmp_path / "nan")).state.step == 10


@pytest.mark.slow
def test_an_own_model_is_built_only_from_the_code_with_its_hash(
    start: Start, tmp_path: Path, run_cli: RunCli
) -> None:
    run = start(OWN, run_name="mine", storage_path=tmp_path, architecture="mine", max_steps=10)
    for action in ("show", "checkpoints", "report"):  # these execute nothing
        run_cli.succeeds("runs", action, "mine", "--storage_path", tmp_path)
    path = newest(run.run_dir).path
    hash12 = Code("", OWN).sha256[:12]
    for used in (None, Code("other.py", OTHER)):
        with raises_line(CheckpointError, "other code", hash12, f"--code {path / CODE_FILE}"):
            open_checkpoint(path.path, registry=Registry(used))
    other = tmp_path / "other.py"
    other.write_text("raise RuntimeError('exe' 'cuted')\n" + OTHER)
    prompt = ("--prompt", "a", "--num_samples", "1", "--max_new_tokens", "2")
    commands: list[tuple[str, ...]] = [("eval",), ("sample", *prompt), ("export", "--out", "x")]
    for name, *more in commands:
        assert "if you trust it" in run_cli.refuses(name, path.path, *more)
        said = run_cli.refuses(name, path.path, *more, "--code", other)
        assert Code.read(other).sha256[:12] in said
        assert "executed" not in said
    out = run_cli.succeeds("sample", path.path, *prompt, "--code", path.path / CODE_FILE)
    assert "--code" in out.splitlines()[-1]
    corrected = tmp_path / "corrected.py"
    corrected.write_text(OTHER)
    out = run_cli.succeeds(
        "sample", path.path, *prompt, "--code", corrected, "--accept_changed_code"
    )
    assert f"changed since that checkpoint: code {hash12} -> " in out
    corrected.write_text(OWN + "\n# a remark\n")
    assert "changed since" in run_cli.succeeds("sample", path.path, *prompt, "--code", corrected)
    run_cli.succeeds("eval", path.path, "--code", run.run_dir.path / CODE_FILE)
    assert "--code" in run_cli.succeeds("runs", "checkpoints", "mine", "--storage_path", tmp_path)


def test_ranks_with_different_code_are_refused(make_config: MakeConfig) -> None:
    ranks = thread_ranks(2)

    def check(rank: int) -> str:
        own = make_config(Code("my.py", OWN if rank else OTHER))
        with raises_line(ConfigError, "rank 1 has code", "same file as --code") as raised:
            check_same_code(own, ranks[rank])
        return str(raised.value)

    with ThreadPoolExecutor(2) as threads:
        assert len({*threads.map(check, range(2))}) == 1
