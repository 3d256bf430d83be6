"""An export is served by transformers' server, and asked through OpenAI's client."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.export.huggingface import export_checkpoint
from tests.checkpoints import write_checkpoint
from tests.ports import free_port

WITHIN_S = 300


@pytest.mark.long
def test_a_served_export_answers_with_the_text_that_the_checkpoint_samples(tmp_path: Path) -> None:
    import openai  # lazy import: it takes seconds

    run, port = tmp_path / "run", free_port()
    write_checkpoint(run, 10, 3.0)
    export = export_checkpoint(run, tmp_path / "book-hf", "fp32", print)
    server = subprocess.Popen(
        [Path(sys.executable).with_name("transformers"), "serve", export, "--port", str(port)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        wait_for(f"http://localhost:{port}/health", server)
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")
        answer = client.completions.create(
            model=str(export), prompt="To be", max_tokens=40, temperature=0
        )
    finally:
        server.terminate()
        server.wait(WITHIN_S)
    _, _, model, encoding, _ = open_checkpoint(run)
    options = SamplingOptions(max_new_tokens=40, temperature=0)
    prompt = encoding.encode_prompt("To be")
    (tokens,) = sample_tokens(model, encoding.eot_token, prompt, 1, options)
    assert answer.choices[0].text == load_tokenizer("bytes").decode(tokens)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + WITHIN_S
    while True:
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < until
            time.sleep(0.2)
