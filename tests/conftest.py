"""What all tests share: real test data where there is some, and the look of an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import tiktoken
from hypothesis import settings

from raytrain_gpt.data.tokenizer import load_tokenizer
from tests.s3 import KEYS, S3Server

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

RaisesLine = Callable[..., AbstractContextManager[None]]


@pytest.fixture(scope="session", autouse=True)
def test_data() -> Iterator[Path | None]:
    """The directory that RAYTRAIN_GPT_TEST_DATA names, None without the variable.

    It has text/*.txt, hellaswag_val_1000.jsonl, and tiktoken/, a filled TIKTOKEN_CACHE_DIR.
    """
    named = os.environ.get("RAYTRAIN_GPT_TEST_DATA")
    if not named:
        yield None
        return
    directory = Path(named).absolute()
    assert (directory / "text").is_dir(), f"RAYTRAIN_GPT_TEST_DATA={named} has no folder text"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(directory / "tiktoken"))
        yield directory


@pytest.fixture(scope="session")
def gpt2(test_data: Path | None) -> tiktoken.Encoding:
    """The gpt2 tokenizer, read from the test data and never downloaded."""
    if test_data is None:
        pytest.skip("the gpt2 vocabulary needs RAYTRAIN_GPT_TEST_DATA")
    return load_tokenizer("gpt2")


@pytest.fixture(params=["bytes", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> str:
    """The name of each tokenizer in turn."""
    if request.param == "gpt2":
        request.getfixturevalue("gpt2")
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def made_keys() -> Iterator[None]:
    """Keys for the test's object store and no other, before a cluster inherits the variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in KEYS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def s3(made_keys: None) -> Iterator[S3Server]:
    """An S3 server; from its start on AWS_ENDPOINT_URL names it."""
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server
    server.close()


@pytest.fixture
def raises_line() -> RaisesLine:
    """`pytest.raises` for an error whose message is one line and has the given words in it."""

    @contextmanager
    def check(kind: type[Exception], *words: str) -> Iterator[None]:
        with pytest.raises(kind) as caught:
            yield
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert word in message, message

    return check
