"""File damage for fuzz tests: changed bytes, lines and JSON values, as from a faulty disk or a bad edit."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from raytrain_gpt.errors import RaytrainGptError

Damage = Callable[[bytes], bytes]

ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1, 5, 2**31, 2**53, 10**9, 10**12, 10**30, 0.5, -0.5, 1e300, 1.7e308, "", "x",
    "a/../b", "é\n\x1b[31m", [], [[1, 2]], {}, {"x": 1}, float("inf"), float("nan"),
]  # fmt: skip
_ODD_TEXTS = [
    b"", b"5", b"null", b"[]", b"{}", b"\xff\xfe", b"\x00" * 64, b"[" * 20_000, b'"' + b"9" * 5000,
    b"9" * 5000, b'{"step": 1, "step": 2}', b"1e999", b"NaN", b"=== step 99 ===",
]  # fmt: skip


def damages() -> st.SearchStrategy[Damage]:
    """Return a strategy for one or two changes to a file."""
    place, texts = st.floats(0, 1, exclude_max=True), st.sampled_from(_ODD_TEXTS)
    one = st.one_of(
        st.builds(_flip, place, st.integers(0, 7)),
        st.builds(_cut, place),
        st.builds(_line, place, texts),
        st.builds(_line_again, place),
        st.builds(lambda text: lambda _: text, texts),
        *[st.builds(_value, place, place, st.sampled_from(ODD_VALUES))] * 4,
        st.builds(_key, place, place, st.booleans()),
    )
    return st.lists(one, min_size=1, max_size=2).map(_all)


def _all(changes: list[Damage]) -> Damage:
    def change(content: bytes) -> bytes:
        for one in changes:
            content = one(content)
        return content

    return change


def _flip(place: float, bit: int) -> Damage:
    def change(content: bytes) -> bytes:
        flipped = bytearray(content)
        if flipped:
            flipped[int(place * len(flipped))] ^= 1 << bit
        return bytes(flipped)

    return change


def _cut(place: float) -> Damage:
    return lambda content: content[: int(place * len(content))]


def _line(place: float, text: bytes) -> Damage:
    return _on_lines(place, lambda line: text)


def _line_again(place: float) -> Damage:
    return _on_lines(place, lambda line: line + b"\n" + line)


def _on_lines(place: float, change_line: Callable[[bytes], bytes]) -> Damage:
    def change(content: bytes) -> bytes:
        lines = content.split(b"\n")
        at = int(place * len(lines))
        lines[at] = change_line(lines[at])
        return b"\n".join(lines)

    return change


def _value(line: float, place: float, value: Any) -> Damage:
    """Return a change of one value in a JSON file, or in one line of a JSON Lines file."""

    def replace(holder: Any, key: Any) -> None:
        holder[key] = value

    return _on_json(line, place, replace)


def _key(line: float, place: float, removes: bool) -> Damage:
    def change(holder: Any, key: Any) -> None:
        value = holder.pop(key)
        if not removes and isinstance(holder, dict):
            holder[f"{key}x"] = value

    return _on_json(line, place, change)


def _on_json(line: float, place: float, change: Callable[[Any, Any], None]) -> Damage:
    def changed(content: bytes) -> bytes:
        try:
            tree = json.loads(content)
        except (ValueError, RecursionError):
            return content
        places = list(_places(tree))
        if places:
            change(*places[int(place * len(places))])
        return json.dumps(tree).encode()

    def change_content(content: bytes) -> bytes:
        whole = changed(content)
        return whole if whole != content else _on_lines(line, changed)(content)

    return change_content


def _places(tree: Any) -> Any:
    """Yield (container, key) of every value; of lists only the first three items, as the rest are similar."""
    if isinstance(tree, dict):
        keys: list[Any] = list(tree)
    elif isinstance(tree, list):
        keys = list(range(min(len(tree), 3)))
    else:
        return
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def damage_file(path: Path, whole: bytes, damage: Damage) -> None:
    """Write the original content with the damage applied."""
    path.write_bytes(damage(whole))


def works_or_says_why(command: Callable[[], object]) -> str | None:
    """Call a command's function and return its error message, or None if it succeeds.

    Any exception other than a RaytrainGptError is a bug.
    """
    try:
        command()
    except RaytrainGptError as error:
        message = str(error)
        assert message
        assert "\n" not in message, message
        return message
    return None


@contextlib.contextmanager
def bounded_work(max_calls: int = 200_000) -> Iterator[None]:
    """Fail at `max_calls` function calls: a damaged number must not determine the amount of work."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")
        if calls == max_calls:
            raise AssertionError(f"more than {max_calls:,} function calls")

    profiler = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(profiler)
    assert calls < max_calls  # an `except Exception` inside may have caught the error
