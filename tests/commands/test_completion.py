"""Shell completion in the installed shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import RunCli

COMPLETE = """
source ./script
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_raytrain_gpt
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "offered", "hidden"),
    [
        (["t"], {"train", "tune"}, {"data"}),
        (["data", ""], {"show", "verify", "stats", "at", "find"}, set()),
        (["data", "at", "--"], {"--step", "--batch", "--worker", "--json"}, {"--png", "--peak_lr"}),
        (["data", "stats", "--"], {"--png"}, {"--step"}),
        (["train", "--peak"], {"--peak_lr"}, {"--min_lr"}),
        (["train", "--preset", "gpt2"], {"gpt2-124m", "gpt2-1.5b"}, {"quickstart"}),
        (["train", "--precision", ""], {"auto", "fp32", "bf16", "fp16"}, set()),
        (["train", "--num_workers", ""], {"auto"}, {"int"}),
        (["completion", ""], {"bash", "zsh", "fish"}, set()),
        (["data", "show", "boo"], {"books"}, set()),
        (["export", "books", "--format", ""], {"hf", "gguf"}, set()),
    ],
)
def test_bash_completes(
    words: list[str], offered: set[str], hidden: set[str], run_cli: RunCli, tmp_path: Path
) -> None:
    (tmp_path / "books").mkdir()
    script = run_cli.succeeds("completion", "bash")
    assert "complete -o bashdefault -F _shtab_raytrain_gpt raytrain-gpt" in script
    (tmp_path / "script").write_text(script)
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE, "bash", "raytrain-gpt", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {one.rstrip("/ ") for one in done.stdout.splitlines()}
    assert offered <= found
    assert not hidden & found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_one_that_its_shell_can_read(
    shell: str, run_cli: RunCli, tmp_path: Path
) -> None:
    script = run_cli.succeeds("completion", shell)
    for word in ("raytrain-gpt", "peak_lr", "gpt2-124m", "checkpoints"):
        assert word in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)
