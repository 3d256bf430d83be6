"""The commands `doctor` and `node`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from raytrain_gpt.commands.flags import ConfigOptions, JsonOptions, command, section_fields
from raytrain_gpt.config.call_options import Metavar, Options
from raytrain_gpt.redact import say


class DoctorOptions(JsonOptions, ConfigOptions):
    """Configuration or code to check."""


@command("doctor", DoctorOptions, section_fields)
def doctor(options: DoctorOptions) -> None:
    """Check a cluster, or your own code, before training.

    Checks everything that `train` with the same flags needs, on the cluster that it would use, by four steps
    that leave nothing behind. With --code, instead checks the kinds that the file declares, in this process.
    Each check is one line: PASS, FAIL with what to do, or SKIP with the reason. The exit code is 1 if one
    fails.
    """
    config, _ = options.resolved()
    if not options.code:
        from raytrain_gpt.doctor.cluster_checks import examine

        checks = examine(config, say)
    else:
        from raytrain_gpt.doctor.code_checks import check_code

        checks = check_code(config, say)
        chosen = dict(reversed(config.registry.user_kinds()))
        options = options.model_copy(update={"fields": {**chosen, **options.fields}})
    ok = all(check.status != "FAIL" for check in checks)
    fix = "fix the FAIL lines, then run this command again"
    say(f"next: {options.train_command() if ok else fix}")
    options.say_json({"ok": ok, "checks": [asdict(check) for check in checks]})
    sys.exit(0 if ok else 1)


class NodeOptions(Options):
    address: Annotated[str, Metavar("HOST:PORT")]
    """Address of the head, as printed by `ray start`."""
    grace_s: float = 60.0
    """Seconds that runs have to save a checkpoint after a signal."""
    flags: Annotated[list[str], Metavar("-- FLAG", positional=True)] = Field(default_factory=list)
    """More flags of `ray start`, such as --num-cpus=8."""


@command("node", NodeOptions)
def node(options: NodeOptions) -> None:
    """Run a worker node of a Ray cluster that lets runs save a checkpoint before it stops.

    The command runs until SIGTERM or Ctrl+C. Training runs then save a checkpoint and continue
    without this node.
    """
    from raytrain_gpt.cluster.node import run_node

    sys.exit(run_node(options.address, options.grace_s, options.flags, say))
