"""Process that trains a small GPT and writes checkpoints, for tests that kill it. No Ray.

It resumes from the newest good checkpoint, after the same cleanup as before an attempt of a run. All ranks
train the same replica on the same generated batches, so the weights depend only on the step. Each rank
writes its shard. After setup, it waits for a message before it reads the run's directory. It sends one
line per event:

    from step=8 · step=9 · begin step=12 · committed step=12 write_s=0.0312 · skipped: …
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.checkpoint.checkpoint_state import CheckpointState
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.checkpoint.writer import CheckpointWriter
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import AdamW
from raytrain_gpt.core.state import load_model, load_optimizer
from raytrain_gpt.storage.location import Location
from tests.training import STATE, steps

EVERY_STEPS = 4
KEEP = 2
SHAPE = GPTShape(num_layers=4, num_heads=4, embd_size=256, seq_len=16, vocab_size=257)
"""3.3M parameters and 39 MB per checkpoint, so that a write takes long enough to be interrupted."""


def write_checkpoints(arguments: list[str], go: Connection, said: Connection) -> None:
    """Train from the newest good checkpoint to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--mark", default="001", help="mark of this attempt")
    parser.add_argument("--wait", action="store_true", help="pause training during each write")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--rendezvous", help="path of a new file; required for two ranks")
    args = parser.parse_args(arguments)
    say = said.send
    torch.set_num_threads(1)
    model = GPT2(SHAPE)
    model.init_weights(0)
    optimizer = AdamW(model, OptimSection())
    go.recv()
    if args.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{args.rendezvous}",
            rank=args.rank,
            world_size=args.world_size,
        )
    ranks = Collectives(args.rank, args.world_size)
    catalog = Catalog(Location.of(args.run_dir))
    first_step = go_on(catalog, ranks, model, optimizer, say)
    say(f"from step={first_step}")
    saver = CheckpointWriter(catalog, args.mark, ranks, model, optimizer, KEEP)
    batches = made_batches(first_step)
    for result in steps(model, optimizer, batches, args.max_steps, first_step=first_step):
        say(f"step={result.step}")
        (writing,) = ranks.any_later(saver.writing)()
        if saver.in_flight and not writing:
            say(collected(saver))
        if result.step % EVERY_STEPS == 0:
            if saver.in_flight:
                say(collected(saver))
            say(f"begin step={result.step}")
            saver.begin(state(result.step, ranks), {"rows.jsonl": f'{{"step": {result.step}}}\n'})
            if args.wait:
                say(collected(saver))
    if saver.in_flight:
        say(collected(saver))
    if args.world_size > 1:
        dist.destroy_process_group()


def go_on(
    catalog: Catalog,
    ranks: Collectives,
    model: GPT,
    optimizer: AdamW,
    say: Callable[[str], None],
) -> int:
    """Load the newest good checkpoint, the same on all ranks; return its step, or 0 without one."""
    newest = None
    if ranks.rank == 0:
        newest = catalog.pick("newest", say)
        catalog.clean(good_until=newest.state.step if newest else 0)
    newest = ranks.all_gather_json(newest, Checkpoint | None)[0]
    if newest is None:
        return 0
    load_model(newest.path.path, model)
    load_optimizer(newest.path.path, model, optimizer)
    return int(newest.state.step)


def made_batches(first_step: int) -> Iterator[MicroBatch]:
    """Yield one batch per step, a function of the step only."""
    step = first_step
    while True:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, SHAPE.vocab_size, (2, SHAPE.seq_len + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]
        step += 1


def state(step: int, ranks: Collectives) -> CheckpointState:
    tokens_seen = 2 * SHAPE.seq_len * step
    workers = ranks.world_size
    return replace(STATE, step=step, next_batch=step, tokens_seen=tokens_seen, num_workers=workers)


def collected(saver: CheckpointWriter) -> str:
    """Wait for the checkpoint in flight and return the line that reports it."""
    saved = saver.collect()
    return f"committed step={saved.state.step} write_s={saved.write_s:.4f}"
