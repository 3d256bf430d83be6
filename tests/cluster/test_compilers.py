"""Machines without a compiler, simulated by a PATH without one."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from raytrain_gpt.cluster.compilers import check_compiler, missing_compiler
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.train.launch import train
from tests.conftest import raises_line
from tests.made_runs import MakeConfig

COMPILED, MASKED = Config().updated({"compile": True}), Config().updated({"document_mask": True})


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_compiler")
def test_a_gpu_without_a_c_compiler_is_one_line_before_the_first_step() -> None:
    ways = ("install gcc and python3-dev", "set compile to false")
    with raises_line(ConfigError, "compile=true needs a C compiler on node a", *ways):
        check_compiler(COMPILED, on_gpu=True, where="node a")
    with raises_line(ConfigError, "document_mask=true needs a C compiler"):
        check_compiler(MASKED, on_gpu=True, where="node a")
    with raises_line(ConfigError, "compile=true needs a C++ compiler on a CPU; install g++"):
        check_compiler(COMPILED, on_gpu=False, where="a CPU")


@pytest.mark.usefixtures("no_compiler")
def test_a_run_that_cannot_compile_ends_before_it_begins(
    make_config: MakeConfig, storage: Path
) -> None:
    config = make_config(num_workers=0, compile=True, run_name="uncompiled")
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler on a CPU"):
        train(config, print)
    assert not (storage / "uncompiled").exists()


@pytest.mark.usefixtures("no_compiler")
def test_who_compiles_nothing_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler(Config(), on_gpu=True, where="here")
    check_compiler(MASKED, on_gpu=False, where="here")
    for changes in ({"dropout": 0.1}, {"activation_checkpointing": "selective"}):
        check_compiler(MASKED.updated(changes), on_gpu=True, where="here")
    monkeypatch.setenv("CC", "/opt/cc")
    assert missing_compiler(on_gpu=True) == ""
    assert missing_compiler(on_gpu=False) == "a C++ compiler"


def test_a_temporary_directory_that_is_mounted_noexec_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "/opt/c++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NODEV)
    )
    with raises_line(
        ConfigError,
        f"{tmp_path} on a CPU is mounted noexec; set TMPDIR",
        "or set compile",
    ):
        check_compiler(COMPILED, on_gpu=False, where="a CPU")


def test_pythons_headers_are_needed_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "/opt/cc")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert missing_compiler(on_gpu=True) == f"Python's headers ({tmp_path}/Python.h)"
