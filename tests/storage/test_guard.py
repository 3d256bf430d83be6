"""A lock file that is removed while others wait for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from raytrain_gpt.storage import guard as guard_module
from raytrain_gpt.storage.guard import guarded

WAIT_S = 30.0


def test_who_waits_for_a_guard_that_is_removed_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, waits, has_it, goes = tmp_path / "guard", *(threading.Event() for _ in range(3))
    monkeypatch.setattr(guard_module.time, "sleep", lambda _: waits.set())

    def wait_for_it() -> None:
        with guarded(path, removed=True) as is_locked:
            assert is_locked
            has_it.set()
            assert goes.wait(WAIT_S)

    thread = threading.Thread(target=wait_for_it)
    with guarded(path, removed=True) as is_locked:
        assert is_locked
        thread.start()
        assert waits.wait(WAIT_S)
        assert not has_it.is_set()
    assert has_it.wait(WAIT_S)
    monkeypatch.setattr(guard_module, "_WAIT_S", 0.0)
    with guarded(path, removed=False) as is_locked:
        assert not is_locked
    goes.set()
    thread.join()
    assert list(tmp_path.iterdir()) == []
