"""Checks before a run starts: data, checkpoints, disk, tools. The doctor calls the same functions."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from raytrain_gpt.checkpoint.catalog import CHECKPOINTS_DIR, resolve_checkpoint
from raytrain_gpt.checkpoint.code_check import code_of, compare
from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import DEFAULT_DATA
from raytrain_gpt.core.memory import checkpoint_bytes
from raytrain_gpt.core.model import GPT2_VOCAB_SIZE, GPTShape
from raytrain_gpt.core.registry import count_model, new_model, resolved_shape
from raytrain_gpt.core.state import load_model
from raytrain_gpt.data.documents import STDLIB
from raytrain_gpt.data.locations import data_is_there, find_in, make_order, read_data, run_location
from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.mixture import Mixture, check_val_split, check_vocabulary, map_paths
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.data.verify import check_shards, check_tokenizer
from raytrain_gpt.errors import CheckpointError, ClusterError, ConfigError
from raytrain_gpt.evaluate.hellaswag import DOWNLOAD
from raytrain_gpt.format import Log, amount, count, size
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.redact import say
from raytrain_gpt.runs.report import REPORT_FILE
from raytrain_gpt.storage.location import Location, is_url
from raytrain_gpt.trackers.configured import absolute_stores, check_packages, tracker_warnings
from raytrain_gpt.trackers.run_files import (
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    RunSync,
)

_DEFAULT_TOKENIZER = "bytes"
_VERIFY_CONTENT_BYTES = 2**30
"""Data up to this size is hashed at every start; beyond it only sizes and footers are read."""
_RUN_FILES_BYTES = 2**24
"""Room for metrics, logs and events."""


def prepare_default_data(config: Config, log: Log) -> Config:
    """Prepare a missing DEFAULT_DATA in this process, and return the `absolute_paths`; raises like these.

    Of the processes of `torchrun` only rank 0 does; the others wait for it in `train_locally`.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    absolute = absolute_paths(config, log) if is_first else absolute_paths(config)
    if config.data.data_path == DEFAULT_DATA and is_first and not data_is_there(absolute):
        data = Location.of(absolute.data.data_path)
        log(f"preparing {data} from the Python standard library's source")
        prepare([STDLIB], data, _DEFAULT_TOKENIZER, PrepareOptions(), log=log, in_process=True)
    return absolute


def expected_vocab_size(config: Config) -> int:
    """Return the vocabulary size of the data, or a guess if the data is missing."""
    if data_is_there(config):
        return read_data(config).vocab_size
    if config.data.data_path == DEFAULT_DATA:
        return int(load_tokenizer(_DEFAULT_TOKENIZER).n_vocab)
    return GPT2_VOCAB_SIZE


def check_data(config: Config, data: Mixture) -> None:
    """Raise a DataError if a shard is damaged, the tokenizer differs, or the data is too small."""
    shards = [shard for dataset in data.datasets for shard in dataset.manifest.shards]
    content = sum(shard.file_bytes for shard in shards) <= _VERIFY_CONTENT_BYTES
    for dataset in data.datasets:
        check_tokenizer(dataset.directory, dataset.manifest)
        check_shards(dataset.directory, dataset.manifest, content)
    make_order(config, data)
    check_val_split(data, config.data.seq_len)


def check_init_from(config: Config, data: Mixture, log: Log = say) -> Config:
    """Resolve `init_from` to one checkpoint; raises a UserError if there is none that fits the model."""
    if config.model.init_from is None:
        return config
    checkpoint = resolve_checkpoint(find_in(config, config.model.init_from), log)
    check_vocabulary(data, checkpoint.state.vocab_hash, str(checkpoint.path))
    theirs = checkpoint.config(config.registry)
    if config.data.seq_len > theirs.data.seq_len:
        raise ConfigError(
            f"seq_len={config.data.seq_len} is above the context of {checkpoint.path}; set seq_len "
            f"to at most {theirs.data.seq_len}"
        )
    shape, has = (resolved_shape(GPTShape.of(of, data.vocab_size)) for of in (config, theirs))
    for name, ours in shape.fields.items():
        if name not in ("seq_len", "dropout") and ours != (value := has.fields.get(name)):
            value = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"{name}={ours}, but {checkpoint.path} has {value}; set {name} to {value}"
            )
    if not BUILT_IN.find("architecture", config.model.architecture):
        change, _ = compare(checkpoint.state.code_sha256, code_of(checkpoint), config.code)
        if change:
            log(f"changed since {checkpoint.path}: {change}")
    with checkpoint.files() as directory:
        load_model(directory, new_model(shape), crop_context=True)
    return config.replaced({"init_from": str(checkpoint.path)})


def check_disk(config: Config, run_dir: Location, vocab_size: int, existing: int) -> None:
    """Raise a ClusterError if the remaining checkpoints, given the `existing` ones, have too little space."""
    each = checkpoint_bytes(GPTShape.of(config, vocab_size), config.optim)
    train = config.train
    in_all = -(-train.max_steps // train.checkpoint_every_steps)
    # The best one is kept as well as the newest, and one more exists while it is written.
    num = max(1, min(in_all, train.keep_checkpoints + 2) - existing)
    needed = num * each + _RUN_FILES_BYTES
    free = run_dir.free_bytes()
    if free is not None and free < needed:
        raise ClusterError(
            f"{run_dir} has {size(free)} free, but {count(num, 'checkpoint')} of {size(each)} would need "
            f"{size(needed)}; free some space, set another storage_path, or lower keep_checkpoints"
        )


def absolute_paths(config: Config, log: Log = lambda line: None) -> Config:
    """Return the configuration with every path absolute; `log` is that of `find`, for `init_from`.

    Raises a ConfigError if one is relative in a submitted job, whose working directory is deleted
    afterwards, or a store or tracker cannot be used; a CheckpointError if `init_from` names nothing.
    """
    check_packages(config)
    run_location(config)
    values = config.field_values()

    def absolute(name: str, path: str) -> str:
        if is_url(path) or Path(path).is_absolute():
            return path
        if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and not path.startswith("~"):
            raise ConfigError(
                f"{name}={values[name]} is relative, but a submitted job's working directory is deleted "
                f"afterwards; set {name} to an absolute path that all nodes share"
            )
        return Location.of(path).url

    changes = {"data_path": map_paths(values["data_path"], partial(absolute, "data_path"))}
    paths = {"storage_path": values["storage_path"]}
    if (start := values["init_from"]) is not None:
        has_begun = (run_location(config) / CHECKPOINTS_DIR).names()  # then it needs no start
        with suppress(CheckpointError) if has_begun else nullcontext():
            found = find_in(config, start, log)
            paths["init_from"] = start if found.url == Location.of(start).url else found.url
    if values["hellaswag_path"] not in (None, DOWNLOAD):
        paths["hellaswag_path"] = values["hellaswag_path"]
    changes |= {name: absolute(name, path) for name, path in paths.items()}
    return config.replaced(changes | absolute_stores(config, absolute))


def check_is_ours(sync: RunSync) -> None:
    """Raise a CheckpointError if a run's files exist, but no run's configuration."""
    names = (CONFIG_FILE, METRICS_FILE, LOG_FILE, SAMPLES_FILE, REPORT_FILE)
    existing = [name for name in names if (sync.work_dir / name).exists()]
    try:
        if existing:
            load_config_file(sync.work_dir / CONFIG_FILE)
    except ConfigError:
        raise CheckpointError(
            f"{sync.run_dir} has {' and '.join(existing)}, but was not written by a run; use another "
            "run_name or storage_path"
        ) from None


def announce(config: Config, world_size: int, data: Mixture, log: Log) -> None:
    """Tell what is about to be trained, and warn of settings that turn others off."""
    log(f"configuration {run_location(config) / CONFIG_FILE}")
    train, c = config.train, config.cluster
    shape = GPTShape.of(config, data.vocab_size)
    each = " each" if world_size > 1 else ""
    log(
        f"model {amount(count_model(shape).num_parameters)} parameters | data "
        f"{amount(data.split_tokens('train'))} train tokens ({data.tokenizer}) | {_epochs(config, data)} | "
        f"{count(train.max_steps, 'step')} of {count(train.global_batch_tokens, 'token')} | "
        f"{count(world_size, 'worker')} with {count(c.num_cpus, 'CPU')}"
        f"{f' and {c.gpus_per_worker:g} GPU' if c.use_gpu else ''}{each}"
    )
    for line in tracker_warnings(config):
        log(line)
    if (warm_up := config.optim.warmup_steps) > train.max_steps:
        log(
            f"warmup_steps={warm_up} is above max_steps={train.max_steps}, so the learning rate never "
            "reaches peak_lr; lower it"
        )


def _epochs(config: Config, data: Mixture) -> str:
    order, seq_len = make_order(config, data), config.data.seq_len
    # Sequences end with their row group, so long ones may leave much of it.
    in_sequences = sum(data.num_sequences("train", seq_len)) * seq_len
    left = 1 - in_sequences / data.split_tokens("train")
    rest = f"; {left:.1%} of the tokens fill no sequence" if left > 0.01 else ""
    if not isinstance(order, MixedOrder):
        return (
            f"{count(order.batches_per_epoch, 'step')} per epoch, dropping "
            f"{order.num_sequences % config.batch_sequences} of {order.num_sequences} sequences{rest}"
        )
    datasets = zip(data.names, data.weights, order.epochs(config.train.max_steps), strict=True)
    shares = [f"{name} {float(weight):.1%} ({n:.2f} epochs)" for name, weight, n in datasets]
    return f"mixed: {', '.join(shares)}{rest}"
