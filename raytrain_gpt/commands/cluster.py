"""The commands `doctor`, `node` and `submit`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import Field

from raytrain_gpt.commands.flags import ConfigOptions, JsonOptions, command, say, section_fields
from raytrain_gpt.config import kinds
from raytrain_gpt.config.call_options import Metavar, Options
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import count, size


class DoctorOptions(JsonOptions, ConfigOptions):
    """The configuration to check, or the code."""


@command("doctor", DoctorOptions, section_fields)
def doctor(options: DoctorOptions) -> None:
    """Check a cluster before training on it, or your own code.

    Checks everything that `train` with the same flags needs, on the cluster that it would use. With --code,
    instead checks the kinds that the file declares, in this process. Each check is one line: PASS, FAIL with
    what to do, or SKIP with the reason. Exit code 1 if one fails.
    """
    config = options.resolved()
    if options.code is None:
        from raytrain_gpt.doctor.examine import examine

        exam = examine(config, say)
        checks, facts = exam.checks, {"all_reduce_bytes_per_s": exam.all_reduce_bytes_per_s}
    else:
        from raytrain_gpt.doctor.conformance import conformance

        checks, facts = conformance(config, say), {}
        chosen = dict(reversed(kinds.own_kinds()))
        options = options.model_copy(update={"fields": {**chosen, **options.fields}})
    ok = all(check.status != "FAIL" for check in checks)
    fix = "fix the FAIL lines, then run this command again"
    say(f"next: {options.train_command() if ok else fix}")
    options.say_json({"ok": ok, "checks": [asdict(check) for check in checks], **facts})
    sys.exit(0 if ok else 1)


class NodeOptions(Options):
    address: Annotated[str, Metavar("HOST:PORT")]
    """Address of the head, as printed by `ray start`."""
    grace_s: float = 60.0
    """Time for runs to save a checkpoint after a signal (seconds)."""
    flags: Annotated[list[str], Metavar("-- FLAG", positional=True)] = Field(default_factory=list)
    """More flags of `ray start`, such as --num-cpus=8."""


@command("node", NodeOptions)
def node(options: NodeOptions) -> None:
    """Run a worker node of a Ray cluster; runs save a checkpoint before it stops.

    The command runs until SIGTERM or Ctrl+C. Training runs then save a checkpoint and continue
    without this node.
    """
    from raytrain_gpt.cluster.node import run_node

    sys.exit(run_node(options.address, options.grace_s, options.flags, say))


class SubmitOptions(ConfigOptions):
    address: Annotated[str | None, Metavar("URL")] = None
    """Dashboard of the head (default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS or http://127.0.0.1:8265)."""
    files: Annotated[str | None, Metavar("PATH,PATH")] = None
    """More files or directories to upload (default: those that git tracks)."""
    accept_changed_code: bool = False
    """Resume although --code has changed; checkpoints record the hashes of both."""
    dry_run: bool = False
    """Print the plain `ray job submit` command, then exit."""


@command("submit", SubmitOptions, section_fields)
def submit(options: SubmitOptions) -> None:
    """Train as a job on a Ray cluster; follows its log and exits with its code.

    Uploads the files of this directory that git tracks. Ctrl+C asks whether to detach, or to stop the job,
    which saves a checkpoint. Submit again to resume. Values: defaults < preset or file < flags.
    """
    from raytrain_gpt.cluster import job
    from raytrain_gpt.cluster.job_files import copy_files, job_files

    config, here = options.resolved(), Path.cwd()
    server = job.ask_job_server(job.job_address(options.address))
    flags = options.fields | _absolute_flags(config, server.is_here)
    own = options.model_dump(include={"preset", "config", "code"}, exclude_none=True)
    sent = {name: file for name, file in own.items() if name != "preset" and "://" not in file}
    named = [name for name in (options.files or "").split(",") if name]
    files = job_files(here, [*named, *sent.values()], say)
    own |= {name: os.path.relpath(Path(file).resolve(), here) for name, file in sent.items()}
    is_checkout = {Path("train.py"), Path("raytrain_gpt", "cli.py")} <= {*files}
    words = ["python", "train.py"] if is_checkout else ["raytrain-gpt", "train"]
    words += [f"--{n}={'null' if v is None else v}" for n, v in {**own, **flags}.items()]
    words += ["--accept_changed_code"] * options.accept_changed_code
    if options.dry_run:
        say(job.plain_command(server.address, words, uploads=bool(files)))
        return
    with tempfile.TemporaryDirectory() as copy:
        num_bytes = copy_files(here, files, Path(copy))
        say(f"uploading {count(len(files), 'file')}, {size(num_bytes)}")
        submitted = job.SubmittedJob(server, words, Path(copy) if files else None)
    say(f"job {submitted.id} on {server.address}")
    sys.exit(job.follow_until_end(submitted, say))


def _absolute_flags(config: Config, is_here: bool) -> dict[str, str | None]:
    """Return flags that make relative paths absolute, for a head on this machine; else refuse such paths."""
    from raytrain_gpt.train.preflight import absolute_paths

    given, absolute = config.field_values(), absolute_paths(config).field_values()
    changed = {name: value for name, value in absolute.items() if value != given[name]}
    if changed and not is_here:
        name = min(changed)
        raise ConfigError(
            f"{name}={given[name]} is relative, and a job runs in a temporary directory on the head, which "
            f"is another machine; set {name} to a path that all nodes share, or an s3:// or gs:// URL"
        )
    return {n: v if isinstance(v, str) else json.dumps(v) for n, v in changed.items()}
