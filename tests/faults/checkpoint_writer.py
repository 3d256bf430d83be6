"""Process that trains a small GPT and writes checkpoints, for tests that kill it. No Ray.

It resumes from the newest good checkpoint, after the same cleanup as before an attempt of a run. The
batches, and therefore the weights, depend only on the step. After setup, it waits for a message before it
reads the run's directory. It sends one line per event:

    from step=8 · step=9 · begin step=12 · committed step=12 write_s=0.0312 · skipped: …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.checkpoint.writer import CheckpointWriter
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.optim import AdamW
from raytrain_gpt.core.state import load_model, load_optimizer
from raytrain_gpt.storage.location import Location
from tests.training import STATE, steps

EVERY_STEPS = 4
KEEP = 2
SHAPE = GPTShape(num_layers=4, num_heads=4, embd_size=256, seq_len=16, vocab_size=257)
"""3.3M parameters and 39 MB per checkpoint, so that a write takes long enough to be interrupted."""


def write_checkpoints(
    run_dir: Location, attempt: str, max_steps: int, wait: bool, go: Connection, said: Connection
) -> None:
    """Train from the newest good checkpoint to the last step; `wait` pauses during each write."""
    torch.set_num_threads(1)
    model = GPT2(SHAPE)
    model.init_weights(0)
    optimizer = AdamW(model, OptimSection())
    go.recv()
    catalog, say = Catalog(run_dir), said.send
    newest = catalog.pick("newest", say)
    first_step = newest.state.step if newest else 0
    catalog.clean(good_until=first_step)
    if newest:
        load_model(newest.path.path, model)
        load_optimizer(newest.path.path, model, optimizer)
    say(f"from step={first_step}")
    saver = CheckpointWriter(catalog, attempt, Collectives(0, 1), model, optimizer, KEEP)

    def collect() -> None:
        if saved := saver.collect():
            say(f"committed step={saved.state.step} write_s={saved.write_s:.4f}")

    batches = made_batches(first_step)
    for result in steps(model, optimizer, batches, max_steps, first_step=first_step):
        step = result.step
        say(f"step={step}")
        if not saver.writing:
            collect()
        if step % EVERY_STEPS == 0:
            collect()
            say(f"begin step={step}")
            state = replace(STATE, step=step, next_batch=step, tokens_seen=2 * SHAPE.seq_len * step)
            saver.begin(state, {"rows.jsonl": f'{{"step": {step}}}\n'})
            if wait:
                collect()
    collect()


def made_batches(step: int) -> Iterator[MicroBatch]:
    """Yield one batch per step, a function of the step only."""
    while True:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, SHAPE.vocab_size, (2, SHAPE.seq_len + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]
        step += 1
