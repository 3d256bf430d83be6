"""`prepare` and `data`: make a dataset, look at one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field

from raytrain_gpt.commands.flags import JsonOptions, Metavar, command, say
from raytrain_gpt.config.call_options import Options
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import count, shell


class PrepareOptions(Options):
    """How a dataset is made; the limits stand in `data.prepare_plan`."""

    sources: Annotated[list[str], Metavar("SOURCE", positional=True)]
    """Files, directories or globs, local, s3://…, gs://… or hf://datasets/OWNER/NAME/…; URLs of files; or
    stdlib (Python's own source). Text: .txt, .jsonl(.gz, .zst), .parquet; token ids: .bin of nanoGPT or
    llm.c, .npy, .parquet with lists. A named file with another ending is text."""
    out: Annotated[str, Metavar("DIR")]
    """New dataset: a directory or s3://bucket/prefix."""
    tokenizer: Annotated[str, Metavar("NAME")] = "bytes"
    """bytes, a tiktoken encoding: gpt2, cl100k_base, …, or a checkpoint; for token ids: what made them."""
    text_field: str = "text"
    """Field of a JSON line or column of a parquet file; for token ids: input_ids or tokens."""
    text_suffixes: Annotated[str | None, Metavar(".md,.py")] = None
    """Ends of names of further files of directories that are read as text (default: none)."""
    document_separator: Annotated[str | None, Metavar("TEXT")] = None
    """What separates documents in text files, as <|endoftext|> (default: none, a file is one document)."""
    val: Annotated[str | None, Metavar("SOURCE")] = None
    """Source of the validation split, left out of the others (default: val_fraction)."""
    val_fraction: float | None = None
    """Fraction of documents for validation; of fewer than 100 documents: the end of the text
    (default: files named for it, as train.txt and val.txt; else 0.01)."""
    val_tokens: int | None = None
    """Use the first documents for validation, about this many tokens (default: val_fraction)."""
    shard_tokens: int = 100_000_000
    """Tokens per shard, approximately."""
    dedupe: Literal["none", "exact"] = "none"
    """exact: keep only the first of documents with the same text."""
    max_bad_documents: int = 0
    """Skip up to this many unreadable documents: not UTF-8, not JSON, or without the text field."""


class DataOptions(JsonOptions):
    """What is looked at."""

    action: Annotated[Literal["show", "verify", "stats", "at", "find"], Metavar(positional=True)]
    """show: contents; verify: check all bytes; stats: document lengths and tokens; at: what a step of a run
    was trained on; find: which steps of a run were trained on a text."""
    what: Annotated[list[str], Metavar("DIR|RUN|TEXT RUN", positional=True)]
    """A dataset: directory or s3://bucket/prefix; at: a run's name or directory; find: a text and a run."""
    step: int | None = Field(None, ge=1)
    """Step to look `at` (default: none)."""
    batch: int | None = Field(None, ge=0)
    """Global batch to look `at`, which a rollback may have skipped since (default: none)."""
    worker: int | None = Field(None, ge=0)
    """Only what this worker had `at` the step (default: all)."""
    documents: bool = False
    """Also number the documents `at` the step, which reads shards from their start."""
    storage_path: str = "runs"
    """Directory or s3:// URL of all runs."""
    png: Annotated[str | None, Metavar("FILE")] = None
    """Plot of `stats` (default: document_lengths.png in DIR)."""


@command("prepare", PrepareOptions)
def prepare(options: PrepareOptions) -> None:
    """Make a dataset from text or token ids.

    A stopped command continues where it was; the finished dataset is the same on any number of CPUs.
    """
    ways = ("val", "val_fraction", "val_tokens")
    given = [f"--{name}" for name in ways if getattr(options, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other; give one of them")
    from raytrain_gpt.cluster.signals import StopSignals
    from raytrain_gpt.data.describe import describe_dataset
    from raytrain_gpt.ingest import prepare as tasks
    from raytrain_gpt.storage.location import Location

    out = Location.of(options.out)
    more = options.model_dump(exclude={"sources", "out", "tokenizer"})
    more["dedupe"] = options.dedupe == "exact"
    with StopSignals("interrupted; finished shards are kept, the same command goes on"):
        manifest = tasks.prepare(options.sources, out, options.tokenizer, log=say, **more)
    describe_dataset(out, manifest, say)
    say(_train_line(options.out))


@command("data", DataOptions)
def data(options: DataOptions) -> None:
    """Show a dataset, verify it, count it, or tell what a run's steps were trained on."""
    wanted = 2 if options.action == "find" else 1
    if len(options.what) != wanted:
        names = {"at": "one RUN", "find": "a TEXT and a RUN"}.get(options.action, "one DIR")
        raise ConfigError(
            f"data {options.action} takes {names}, got {len(options.what)}; see: raytrain-gpt data --help"
        )
    {"at": _at, "find": _find}.get(options.action, _look_at)(options)


def _at(options: DataOptions) -> None:
    from raytrain_gpt.storage.location import Location
    from raytrain_gpt.train.trained_on import RunData, described

    if (options.step is None) == (options.batch is None):
        raise ConfigError("data at takes --step N or --batch N; see: raytrain-gpt data --help")
    if options.step is None and options.worker is not None:
        raise ConfigError("data at takes --worker N with --step N; see: raytrain-gpt data --help")
    run = RunData(options.what[0], Location.of(options.storage_path))
    facts: dict[str, int | None]
    if options.step is not None:
        sequences = run.step(options.step, options.worker, options.documents)
        facts = {"step": options.step, "batch": run.batch_of(options.step)}
    else:
        assert options.batch is not None
        sequences = run.batch(options.batch, options.documents)
        facts = {"step": None, "batch": options.batch}
    for sequence in sequences:
        say(described(sequence))
    found = [asdict(sequence) for sequence in sequences]
    options.say_json({"run": str(run.dir), **facts, "sequences": found})


def _find(options: DataOptions) -> None:
    from raytrain_gpt.storage.location import Location
    from raytrain_gpt.train.trained_on import RunData

    text, name = options.what
    run = RunData(name, Location.of(options.storage_path))
    facts = run.find(text, say)
    for step in facts["steps"]:
        places = [f"{one['dataset']} {one['shard']} row {one['row']}" for one in step["sequences"]]
        say(f"step {step['step']}: {', '.join(places)}")
    say(
        f"{count(len(facts['steps']), 'step')} of {run.last_step} had it; in {count(facts['cut'], 'place')} "
        "the end of a sequence cuts it, so that no step has it whole"
    )
    options.say_json({"run": str(run.dir), "text": text, **facts})


def _look_at(options: DataOptions) -> None:
    from raytrain_gpt.data.describe import PICTURE_FILE, dataset_stats, describe_dataset
    from raytrain_gpt.data.shards import read_manifest
    from raytrain_gpt.data.verify import check_shard, check_tokenizer
    from raytrain_gpt.storage.location import Location

    directory = Location.of(options.what[0])
    manifest = read_manifest(directory)
    if options.action == "stats":
        picture = Location.of(options.png) if options.png else directory / PICTURE_FILE
        facts = dataset_stats(directory, manifest, picture, say)
    else:
        if options.action == "verify":
            check_tokenizer(directory, manifest)
            for shard in manifest.shards:
                check_shard(directory, manifest, shard, content=True)
                if not options.as_json:
                    say(f"{shard.path} ok: {count(shard.tokens, 'token')}, hash and ids checked")
            say(f"intact: {count(len(manifest.shards), 'shard')} of {directory}")
        described = describe_dataset(directory, manifest, say)
        facts = described | {"verified": options.action == "verify"}
    say(_train_line(options.what[0]))
    options.say_json(facts)


def _train_line(directory: str) -> str:
    return f"next: {shell('raytrain-gpt', 'train', '--data_path', directory)} --run_name my-run"
