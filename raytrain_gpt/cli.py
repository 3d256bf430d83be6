"""The command line: `raytrain-gpt COMMAND …`.

Configuration flags are made from the configuration tree, so that a leaf's name is its flag. Every
error of the user's is one line on stderr with exit code 2; 130 after Ctrl+C or SIGTERM; 1 otherwise.
What a command needs is imported when it runs, so that help and messages come at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from raytrain_gpt import __version__
from raytrain_gpt.config import (
    DEFAULT_PRESET,
    LEAVES,
    Config,
    micro_batches_per_step,
    preset_names,
    resolve,
    suggestion,
)
from raytrain_gpt.errors import Interrupted, RaytrainGptError, UserError
from raytrain_gpt.redact import redacted
from raytrain_gpt.sweep.spec import DECIDED, SWEEP_FLAGS, Sweep, load_sweep


class _Parser(argparse.ArgumentParser):
    """Errors in one line, flags with hyphens or underscores, no guessed abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            flags = [f.lstrip("-") for action in self._actions for f in action.option_strings]
            hint = suggestion(flag.lstrip("-"), flags) if flag.startswith("--") else ""
            raise UserError(
                f"unknown argument {flag} of {self.prog}{hint or f'; see: {self.prog} --help'}"
            )
        return known, unknown


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    try:
        args = _parser().parse_args(_underscored(sys.argv[1:] if argv is None else argv))
        args.command(args)
    except RaytrainGptError as error:
        kind = "error: " if error.exit_code != Interrupted.exit_code else ""
        if error.__cause__ is not None:
            _complain("".join(traceback.format_exception(error.__cause__)).rstrip())
        _complain(f"{kind}{' '.join(str(error).split())}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(130)
    except Exception:
        _complain(traceback.format_exc().rstrip())
        sys.exit(1)
    sys.exit(0)


def _complain(text: str) -> None:
    print(redacted(text), file=sys.stderr, flush=True)


def _underscored(argv: Sequence[str]) -> list[str]:
    """All flags with underscores, but for those behind `--`, which are another program's."""
    own = argv.index("--") if "--" in argv else len(argv)
    return [*map(_underscored_flag, argv[:own]), *argv[own:]]


def _underscored_flag(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return f"--{flag[2:].replace('-', '_')}{equals}{value}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="raytrain-gpt",
        description="Pretrain GPT-2-class language models on Ray: from text to a trained model.",
    )
    parser.add_argument("--version", action="version", version=f"raytrain-gpt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    prepare = commands.add_parser("prepare", help="tokenize text into a dataset")
    prepare.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help=".txt, .jsonl or .parquet files, directories or globs, local or s3://…, or stdlib "
        "(Python's own source)",
    )
    prepare.add_argument(
        "--out", required=True, metavar="DIR", help="where the dataset goes, or s3://bucket/prefix"
    )
    prepare.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, or a tiktoken encoding: gpt2, cl100k_base, … (default: bytes)",
    )
    prepare.add_argument(
        "--text_field",
        default="text",
        metavar="NAME",
        help="field of a JSON line, column of a parquet file (default: text)",
    )
    split = prepare.add_mutually_exclusive_group()
    split.add_argument(
        "--val_fraction",
        type=float,
        default=0.01,
        metavar="F",
        help="share of documents that validate; of fewer than 100, the end of the text (default: 0.01)",
    )
    split.add_argument(
        "--val_tokens",
        type=int,
        metavar="N",
        help="the first documents validate, about N tokens of them",
    )
    prepare.add_argument(
        "--shard_tokens",
        type=int,
        default=100_000_000,
        metavar="N",
        help="tokens of a shard, about (default: 100000000)",
    )
    prepare.set_defaults(command=_prepare)

    data = commands.add_parser("data", help="show a dataset, or verify every byte of it")
    data.add_argument("action", choices=("show", "verify"))
    data.add_argument("directory", metavar="DIR", help="a dataset, or s3://bucket/prefix")
    _json_flag(data, _data)

    train = commands.add_parser(
        "train",
        help="train a model, or go on with a run",
        description="Train a model. Defaults < preset < configuration file < flags; without --preset and "
        f"--config the preset is {DEFAULT_PRESET}. The same run_name goes on where it stopped.",
    )
    _add_config(train)
    train.add_argument(
        "--dry_run", action="store_true", help="print the resolved configuration and stop"
    )
    _add_leaves(train)
    train.set_defaults(command=_train)

    tune = commands.add_parser(
        "tune",
        help="search learning rate, batch size or anything else over many runs",
        description="Run the trials of a sweep file, compare them at equal tokens, and write down the best "
        "configuration. Flags win over the file.",
    )
    tune.add_argument("file", type=Path, metavar="FILE", help="a sweep file, as in tune_configs/")
    tune.add_argument(
        "--resume", action="store_true", help="go on with a sweep that was stopped or killed"
    )
    tune.add_argument(
        "--dry_run", action="store_true", help="print the trials and what they cost, and stop"
    )
    search = tune.add_argument_group("sweep")
    for name in SWEEP_FLAGS:
        field = Sweep.model_fields[name]
        _add_flag(search, name, field.annotation, f"{field.description} (default: the file's)")
    _add_leaves(tune, without=DECIDED)
    tune.set_defaults(command=_tune)

    doctor = commands.add_parser(
        "doctor",
        help="find what is wrong with a cluster before training on it",
        description="Look at all that `train` with the same flags needs, on the cluster that it would use: "
        "a line for each check, PASS, FAIL with what to do, or SKIP with why. Exit code 1 if one fails.",
    )
    _add_config(doctor)
    doctor.add_argument(
        "--bench",
        action="store_true",
        help="time some steps: tokens/s, and when max_steps are done",
    )
    doctor.add_argument(
        "--tokenizer", metavar="NAME", help="also see that `prepare --tokenizer NAME` finds it"
    )
    _add_leaves(doctor)
    _json_flag(doctor, _doctor)

    runs = commands.add_parser("runs", help="list, show, compare runs and their checkpoints")
    runs.add_argument("action", choices=("list", "show", "checkpoints", "report"))
    runs.add_argument("runs", nargs="*", metavar="RUN", help="a run's name or directory")
    runs.add_argument(
        "--storage_path",
        default="runs",
        metavar="DIR",
        help="directory or s3:// URL of all runs (default: runs)",
    )
    _json_flag(runs, _runs)

    evaluate = commands.add_parser("eval", help="validation loss of a checkpoint")
    _checkpoint_argument(evaluate)
    evaluate.add_argument(
        "--data", metavar="DIR", help="dataset (default: the one it was trained on)"
    )
    evaluate.add_argument(
        "--eval_tokens",
        type=int,
        metavar="N",
        help="upper limit of tokens (default: as in training)",
    )
    _json_flag(evaluate, _eval)

    sample = commands.add_parser("sample", help="continue a prompt with a checkpoint")
    _checkpoint_argument(sample)
    sample.add_argument("--prompt", required=True, metavar="TEXT")
    sample.add_argument(
        "--num_samples", type=int, default=5, metavar="N", help="continuations (default: 5)"
    )
    sample.add_argument(
        "--max_new_tokens", type=int, default=32, metavar="N", help="tokens of each (default: 32)"
    )
    sample.add_argument(
        "--top_k",
        type=int,
        default=50,
        metavar="K",
        help="draw from the k most likely tokens (default: 50)",
    )
    sample.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="0: always the most likely token (default: 1.0)",
    )
    sample.add_argument(
        "--seed", type=int, default=42, metavar="N", help="of the draws (default: 42)"
    )
    sample.set_defaults(command=_sample)

    node = commands.add_parser(
        "node",
        help="be a worker node of a cluster, whose runs save when it is taken away",
        description="Start a worker node of a Ray cluster, and stay. On SIGTERM or Ctrl+C the runs on it "
        "save and go on without it; then the node stops.",
    )
    node.add_argument(
        "--address", required=True, metavar="HOST:PORT", help="as the head's `ray start` prints it"
    )
    node.add_argument(
        "--grace_s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long runs may take to save after the signal (default: 60)",
    )
    node.add_argument(
        "flags", nargs="*", metavar="-- FLAG", help="further flags of `ray start`, as --num-cpus=8"
    )
    node.set_defaults(command=_node)
    return parser


def _json_flag(parser: argparse.ArgumentParser, command: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.set_defaults(command=command)


def _checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint's directory or s3:// URL, or a run's: its best, else newest",
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--preset", metavar="NAME", help=", ".join(preset_names()))
    base.add_argument("--config", type=Path, metavar="FILE", help="YAML, in sections as below")


def _add_leaves(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    groups = {name: parser.add_argument_group(name) for name in Config.model_fields}
    for name, (section, leaf) in LEAVES.items():
        if name not in without:
            default = json.dumps(leaf.default).strip('"')
            text = f"{leaf.description} (default: {default})"
            _add_flag(groups[section], name, leaf.annotation, text)


def _add_flag(group: Any, name: str, annotation: Any, text: str) -> None:
    group.add_argument(
        f"--{name}",
        metavar=_kind(annotation),
        help=text.replace("%", "%%"),
        default=argparse.SUPPRESS,
    )


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    parts = typing.get_args(annotation)
    if parts:
        return "|".join(_kind(part) for part in parts)
    return (
        "null"
        if annotation is type(None)
        else {"bool": "true|false"}.get(annotation.__name__, annotation.__name__)
    )


def _config(args: argparse.Namespace) -> Config:
    flags = {name: getattr(args, name) for name in LEAVES if hasattr(args, name)}
    leaves = {name: None if value == "null" else value for name, value in flags.items()}
    return resolve(args.preset, args.config, leaves)


def _say(line: str) -> None:
    print(redacted(line), flush=True)


def _prepare(args: argparse.Namespace) -> None:
    from raytrain_gpt.data.storage import Location
    from raytrain_gpt.runtime import show
    from raytrain_gpt.runtime.launch import prepare_dataset

    out = Location.of(args.out)
    options = {"text_field": args.text_field, "val_fraction": args.val_fraction}
    options |= {"val_tokens": args.val_tokens, "shard_tokens": args.shard_tokens}
    manifest = prepare_dataset(args.sources, out, args.tokenizer, _say, **options)
    show.dataset(out, manifest, _say)
    _say(f"next: raytrain-gpt train --data_path {args.out} --run_name my-run")


def _data(args: argparse.Namespace) -> None:
    from raytrain_gpt.data.shards import check_shard, check_tokenizer, read_manifest
    from raytrain_gpt.data.storage import Location
    from raytrain_gpt.runtime import show

    directory = Location.of(args.directory)
    manifest = read_manifest(directory)
    if args.action == "verify":
        check_tokenizer(directory, manifest)
        for shard in manifest.shards:
            check_shard(directory, manifest, shard, content=True)
            if not args.json:
                _say(f"{shard.path} ok: {shard.tokens} tokens, hash and ids checked")
        _say(f"all {len(manifest.shards)} shards of {directory} are whole")
    facts = show.dataset(directory, manifest, _say)
    if args.json:
        _say(json.dumps(facts | {"verified": args.action == "verify"}))
    else:
        _say(f"next: raytrain-gpt train --data_path {args.directory} --run_name my-run")


def _train(args: argparse.Namespace) -> None:
    config = _config(args)
    if isinstance(config.cluster.num_workers, int):
        micro_batches_per_step(config, config.cluster.num_workers)
    if args.dry_run:
        _say(config.to_yaml().rstrip())
        _say("next: the same command without --dry_run")
        return
    from raytrain_gpt.runtime import show
    from raytrain_gpt.runtime.launch import train

    show.run_end(train(config, _say), _say)


def _tune(args: argparse.Namespace) -> None:
    names = [*SWEEP_FLAGS, *LEAVES]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    flags = {name: value for name, value in given.items() if name not in DECIDED}
    sweep = load_sweep(args.file, flags)
    if args.dry_run:
        from raytrain_gpt.sweep.cost import cost_lines

        for line in cost_lines(sweep):
            _say(line)
        _say("next: the same command without --dry_run")
        return
    from raytrain_gpt.sweep.launch import run_sweep

    summary = run_sweep(sweep, goes_on=args.resume, log=_say)
    for name in summary.files:
        _say(f"{name:<16}{summary.directory / name}")
    _say(f"next: raytrain-gpt train --config {summary.directory / 'best.yaml'}")


def _doctor(args: argparse.Namespace) -> None:
    config = _config(args)
    if isinstance(config.cluster.num_workers, int):
        micro_batches_per_step(config, config.cluster.num_workers)
    from raytrain_gpt.doctor.examine import examine

    found = examine(config, args.tokenizer, args.bench, _say)
    if args.json:
        _say(json.dumps(found.as_json()))
    sys.exit(0 if found.ok else 1)


def _runs(args: argparse.Namespace) -> None:
    from raytrain_gpt.data.storage import Location
    from raytrain_gpt.runtime import show

    show.runs_command(args.action, args.runs, Location.of(args.storage_path), args.json, _say)


def _eval(args: argparse.Namespace) -> None:
    from raytrain_gpt.runtime import show
    from raytrain_gpt.runtime.use import evaluate_checkpoint

    path, metrics = evaluate_checkpoint(args.checkpoint, args.data, args.eval_tokens)
    show.evaluation(path, metrics, _say)
    if args.json:
        _say(json.dumps({"checkpoint": str(path), **metrics}))


def _sample(args: argparse.Namespace) -> None:
    from raytrain_gpt.runtime.use import sample_checkpoint

    options = {
        n: getattr(args, n)
        for n in ("num_samples", "max_new_tokens", "top_k", "temperature", "seed")
    }
    for text in sample_checkpoint(args.checkpoint, args.prompt, _say, **options):
        _say(f"{text}\n{'-' * 40}")
    _say(f"next: raytrain-gpt eval {args.checkpoint}")


def _node(args: argparse.Namespace) -> None:
    from raytrain_gpt.runtime.node import run_node

    sys.exit(run_node(args.address, args.grace_s, args.flags, _say))


if __name__ == "__main__":
    main()
