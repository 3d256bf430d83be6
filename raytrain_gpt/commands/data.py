"""The commands `prepare` and `data`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from raytrain_gpt.commands import flags
from raytrain_gpt.config.call_options import Metavar, PrepareOptions
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import count, shell
from raytrain_gpt.redact import say


class PrepareFlags(PrepareOptions, flags.ProgressOptions):
    sources: Annotated[list[str], Metavar("SOURCE", positional=True)]
    """Files, directories or globs: local, s3://…, gs://… or hf://datasets/OWNER/NAME/…; or stdlib
    (Python's own source). Text: .txt, .jsonl(.gz, .zst), .json, .parquet; token ids: .bin of nanoGPT
    or llm.c, .npy, .parquet with lists. A file named with another suffix is text."""
    out: Annotated[str, Metavar("DIR")]
    """New dataset: a directory or s3://bucket/prefix."""
    tokenizer: Annotated[str, Metavar("NAME")] = "bytes"
    """Tokenizer; bytes, a tiktoken encoding (gpt2, …), bpe:VOCAB_SIZE to train one, or a tokenizer.json,
    dataset or checkpoint; for token ids: their tokenizer."""


class DatasetOptions(flags.JsonOptions):
    directory: Annotated[str, Metavar("DIR", positional=True)]
    """A dataset: directory or s3://bucket/prefix."""


class AtOptions(flags.DataOptions, flags.RunOptions):
    step: int | None = Field(None, ge=1)
    """Step to show (default: none)."""
    batch: int | None = Field(None, ge=0)
    """Global batch to show, even if a rollback has skipped it (default: none)."""
    worker: int | None = Field(None, ge=0)
    """Worker whose sequences to show (default: all)."""


class FindOptions(flags.DataOptions):
    text: Annotated[str, Metavar("TEXT", positional=True)]
    """Text to find in documents."""
    run: Annotated[str, Metavar("RUN", positional=True)]
    """Name, path or s3:// URL of a run."""


@flags.command("prepare", PrepareFlags)
def prepare(options: PrepareFlags) -> None:
    """Make a dataset from text or token ids.

    Run an interrupted command again to continue it. The dataset is the same on any number of CPUs.
    """
    from raytrain_gpt.cluster.signals import StopSignals
    from raytrain_gpt.data.verify import describe_dataset
    from raytrain_gpt.ingest import prepare as tasks
    from raytrain_gpt.storage.location import Location

    out = Location.of(options.out)
    with StopSignals("interrupted; finished shards are kept; run the same command to continue"):
        manifest = tasks.prepare(options.sources, out, options.tokenizer, options, log=options.log)
    describe_dataset(out, manifest, say)
    say(_train_line(options.out))


@flags.command("show", DatasetOptions)
def show(options: DatasetOptions) -> None:
    """Show the contents of a dataset."""
    _describe(options, verified=False)


@flags.command("verify", DatasetOptions)
def verify(options: DatasetOptions) -> None:
    """Check all bytes of a dataset."""
    from raytrain_gpt.data.shards import read_manifest
    from raytrain_gpt.data.verify import check_shard, check_tokenizer
    from raytrain_gpt.storage.location import Location

    directory = Location.of(options.directory)
    manifest = read_manifest(directory)
    check_tokenizer(directory, manifest)
    for shard in manifest.shards:
        check_shard(directory, manifest, shard, content=True)
        if not options.as_json:
            say(f"{shard.path} ok: {count(shard.tokens, 'token')}, hash and ids checked")
    say(f"intact: {count(len(manifest.shards), 'shard')} of {directory}")
    _describe(options, verified=True)


def _describe(options: DatasetOptions, *, verified: bool) -> None:
    from raytrain_gpt.data.shards import read_manifest
    from raytrain_gpt.data.verify import describe_dataset
    from raytrain_gpt.storage.location import Location

    directory = Location.of(options.directory)
    facts = describe_dataset(directory, read_manifest(directory), say)
    say(_train_line(options.directory))
    options.say_json(facts | {"verified": verified})


@flags.command("at", AtOptions)
def at(options: AtOptions) -> None:
    """Show the sequences that a run trained on at a step."""
    from raytrain_gpt.runs.provenance import describe_sequence

    run = options.open_run(options.run)
    step, batch = options.step, options.batch
    if step is not None and batch is None:
        sequences, batch = run.step(step, options.worker), run.batch_of(step)
    elif batch is not None and step is None and options.worker is None:
        sequences = run.batch(batch)
    else:
        raise ConfigError(
            "data at takes --step N or --batch N; --worker needs --step; see: raytrain-gpt data at --help"
        )
    rows = [asdict(sequence) for sequence in sequences]
    for row in rows:
        say(describe_sequence(row))
    options.say_json({"run": str(run.dir), "step": step, "batch": batch, "sequences": rows})


@flags.command("find", FindOptions)
def find(options: FindOptions) -> None:
    """Find the steps of a run that trained on a text."""
    run = options.open_run(options.run)
    facts = run.find(options.text)
    for step in facts["steps"]:
        rows = [f"{one['dataset']} {one['shard']} row {one['row']}" for one in step["sequences"]]
        say(f"step {step['step']}: {', '.join(rows)}")
    say(
        f"{count(len(facts['steps']), 'step')} of {run.last_step} trained on it; "
        f"{count(facts['cut'], 'occurrence')} split across two sequences, so no step has the full text"
    )
    options.say_json({"run": str(run.dir), "text": options.text, **facts})


def _train_line(directory: str) -> str:
    return f"next: {shell('raytrain-gpt', 'train', '--data_path', directory)} --run_name my-run"


data = flags.CommandGroup(
    "data",
    "Show or verify a dataset, or show the text that a run's steps trained on.",
    (show, verify, at, find),
)
