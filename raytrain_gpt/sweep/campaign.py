"""What sweeps and studies share: checks, cluster, lease, and their trials in Ray Tune.

Their directory has the resolved file, `base.yaml`, the history, and a run for each trial. On `--resume` the
file and configuration must be the same, and only trials that have not ended run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.result import DONE

from raytrain_gpt.checkpoint.catalog import CODE_FILE
from raytrain_gpt.checkpoint.code_check import compare, stored_code
from raytrain_gpt.cluster.all_nodes import check_storage
from raytrain_gpt.cluster.capacity import fit_to_cluster
from raytrain_gpt.cluster.connection import connected
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.load import without_removed
from raytrain_gpt.config.schema import Config, changed_fields, changes_math, parse_config
from raytrain_gpt.data.locations import location, read_data
from raytrain_gpt.errors import ConfigError, Interrupted
from raytrain_gpt.format import Log, count
from raytrain_gpt.parsing import parse_yaml
from raytrain_gpt.storage.lease import LEASE_FILE, Lease, hold_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep import cost
from raytrain_gpt.sweep.history import ENDED, History
from raytrain_gpt.sweep.results import counts_text
from raytrain_gpt.sweep.scheduler import InPlannedOrder, PlannedTrials, Rule
from raytrain_gpt.sweep.spec import CampaignFile
from raytrain_gpt.sweep.trial import END_KEY, TrialActor, TrialContext
from raytrain_gpt.trackers.configured import tracker_warnings
from raytrain_gpt.trackers.mlflow_run import ParentRun, mark_interrupted, tracking_uri
from raytrain_gpt.trackers.run_files import CONFIG_FILE
from raytrain_gpt.train import preflight
from raytrain_gpt.train.worker_group import TrainLoop
from raytrain_gpt.version import VERSION

BASE_FILE = "base.yaml"
FACTS_FILE = "facts.json"
_CHANGES_LOSS = ("data_path", "init_from", "branch_from")
"""Fields that may change when a run resumes, but change the objective of trials, as those of eval do."""
_INTERRUPTED = "interrupted; continue with the same command and --resume"
_TUNE_DIR = "tune"
"""Ray Tune's own files, in the directory until the end."""
_TUNE_ENVIRONMENT = {
    # We print a line when a trial ends, and only the old output can be silenced.
    "RAY_AIR_NEW_OUTPUT": "0",
    # The history and the runs already have the content of these.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # We handle signals.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


class Campaign:
    """A sweep or study; raises a ConfigError if it has changed, or data or storage cannot be used.

    Attributes:
        base: With absolute paths, and one worker for each trial where `num_workers` is `auto`.
        fitted: Configuration of the trials on the cluster.
    """

    fitted: Config
    history: History
    lease: Lease
    parent: ParentRun

    def __init__(
        self,
        definition: CampaignFile,
        base: Config,
        signals: StopSignals,
        log: Log,
        train_loop: TrainLoop,
        *,
        resume: bool,
    ) -> None:
        self.definition, self.title = definition, definition.title
        self.signals, self.log, self._train_loop = signals, log, train_loop
        self.base = preflight.prepare_default_data(cost.one_worker_for_auto(base), log)
        self.data = read_data(self.base)  # raises before a cluster starts
        self.directory = location(self.base, self.base.run.storage_path) / definition.name
        self._facts = {"data": self.data.hash, "vocabulary": self.data.vocab_hash}
        self._facts |= {"torch": torch.__version__, "raytrain-gpt": VERSION}
        for change in check_unchanged(definition, self.base, self._facts, self.directory, resume):
            log(f"changed since it started: {change}")
        for line in tracker_warnings(self.base):
            log(line)

    @contextlib.contextmanager
    def on_cluster(self, number: int, most: int | None, maximize: bool = False) -> Iterator[None]:
        """Connect, fit trials, at `most` at once, and hold the lease; an error ends the tracked run."""
        definition, base = self.definition, self.base
        cpus = cost.fit_here(base, number, most) * cost.trial_cpus(base)
        with connected(cpus, self.log) as resources:
            resources = replace(resources, data_cpus=cost.data_cpus(base))
            fitted, _ = fit_to_cluster(base, resources)
            # Trials of one worker only check their own node.
            check_storage(self.directory, [one.directory for one in self.data.datasets])
            self._at_once = cost.trials_at_once(fitted, resources, number, most)
            with hold_lease(self.directory / LEASE_FILE, self.title, self.log) as self.lease:
                (self.directory / BASE_FILE).write_text(base.to_yaml())
                (self.directory / FACTS_FILE).write_text(json.dumps(self._facts))
                if base.code:
                    (self.directory / CODE_FILE).write_text(base.code.text)
                (self.directory / definition.file).write_text(definition.to_yaml())
                runs, uri = self.directory / definition.runs_dir, tracking_uri(fitted)
                changes: dict[str, Any] = {"storage_path": str(runs), "mlflow_uri": uri}
                if fitted.cluster.num_workers == 1:  # the trial's process trains, as in local mode
                    changes |= {"num_workers": 0, "min_workers": None}
                self.fitted = fitted.replaced(changes)
                self.history = History(self.directory, maximize, definition.history_file)
                self.parent = ParentRun(self.directory, base, definition.model_dump(), self.log)
                with self.parent.ended_by_errors():
                    yield

    def run(
        self,
        names: Sequence[str],
        planned: Callable[[str], tuple[Config, dict[str, Any]]],
        rule: Rule,
        objective: str,
    ) -> None:
        """Run the trials that have not ended, in the plan's order, that of `names`.

        `planned` returns configuration and values of a trial that starts. Raises Interrupted after a signal,
        or a UserError, for example if another process took the campaign over.
        """
        history = self.history
        if not (rest := [name for name in names if history.trial(name).state not in ENDED]):
            return
        history.open = {*rest}
        self.log(
            f"{self.title}: {count(len(rest), 'run')} of {len(names)} to train, {self._at_once} at once, "
            f"each {count(cost.trial_cpus(self.base), 'CPU')}"
        )

        def start(name: str) -> dict[str, Any]:
            config, values = planned(name)
            return {"config": config.replaced({"run_name": name}).to_yaml(), "values": values}

        scheduler = InPlannedOrder(rule, history, rest, self._at_once, start)
        self.signals.defer(self._mark_interrupted)
        try:
            self._tune(rest, scheduler, CampaignCallback(self, len(names)), objective)
            self.lease.verify()
            if history.open:
                # Ray Tune returns at once on SIGUSR1, which batch systems may send.
                raise Interrupted(_INTERRUPTED)
        except Interrupted:
            with contextlib.suppress(Exception):  # a tracker's error
                self._mark_interrupted()
            raise
        except Exception as error:
            raise user_error_in(error) or error from None

    def _mark_interrupted(self) -> None:
        running = [trial.name for trial in self.history.trials() if trial.state == "running"]
        runs = self.directory / self.definition.runs_dir
        for directory in (self.directory, *(runs / name for name in running)):
            mark_interrupted(directory, self.fitted)

    def _tune(
        self,
        names: Sequence[str],
        scheduler: InPlannedOrder,
        callback: CampaignCallback,
        objective: str,
    ) -> None:
        os.environ.update(_TUNE_ENVIRONMENT)
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        cluster = self.fitted.cluster
        resources: dict[str, float] = {"memory": 2**29}  # bytes that a trial's process reserves
        if cluster.is_local:
            resources |= {"cpu": cluster.num_cpus, "gpu": cluster.num_gpus}
        filesystem, path = (self.directory / _TUNE_DIR).ray_filesystem()
        tags = {**self.parent.child_tags, self.definition.kind(): self.definition.name}
        context = TrialContext(self.fitted, objective, tags, self._train_loop)
        # Not a Tuner, which pickles all its arguments for restarts that we do ourselves.
        tune.run(
            tune.with_resources(tune.with_parameters(TrialActor, context=context), resources),
            name=f"{time.time():.0f}",
            config={"name": tune.grid_search([*names])},
            search_alg=PlannedTrials(self.history.open),
            scheduler=scheduler,
            storage_path=path,
            storage_filesystem=filesystem,
            trial_name_creator=lambda trial: trial.config["name"],
            callbacks=[callback],
            reuse_actors=cluster.is_local,
            # A run of several workers restarts them itself.
            max_failures=cluster.max_failures if cluster.is_local else 0,
            raise_on_failed_trial=False,
            verbose=0,
        )

    def close(self, is_success: bool, numbers: dict[str, float], files: dict[str, bytes]) -> None:
        """Remove what only Ray Tune needs, and end the tracked run with its results."""
        (self.directory / _TUNE_DIR).remove()
        self.parent.close("finished" if is_success else "failed", numbers, files)


def check_unchanged(
    definition: CampaignFile, base: Config, facts: dict[str, str], directory: Location, resume: bool
) -> list[str]:
    """Compare a campaign with what it was when it started; returns changes of accepted code and of software.

    Raises a ConfigError if it exists and `resume` is false, or it was changed since.
    """
    title, file = definition.title, directory / definition.file
    another = f"start a new one with another --{definition.kind()}_name"
    if (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"{directory} is already a run; {another}")
    if not file.is_file():
        return []
    if not resume:
        raise ConfigError(f"{title} already exists in {directory}; use --resume, or {another}")
    before, now = parse_yaml(file.read_text()), definition.model_dump(mode="json")
    changed = [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in now
        if before.get(key) != now.get(key) and key not in definition.may_change
    ]
    kept = parse_yaml((directory / BASE_FILE).read_text())
    first = parse_config(without_removed(kept), BASE_FILE, base.registry)
    measured = {*_CHANGES_LOSS, *dict(first.eval), *dict(base.eval)}
    changed += [
        f"{name} {values}"
        for name, values in changed_fields(first.field_values(), base.field_values()).items()
        if name in measured or changes_math(name, first, base)
    ]
    code = stored_code(directory)
    change, may_replace = compare(code.sha256 if code else None, code, base.code)
    if not may_replace:
        changed.append(f"{change} (from {directory / CODE_FILE}; --accept_changed_code accepts it)")
    known = directory / FACTS_FILE  # earlier versions have none
    facts_changed = changed_fields(parse_yaml(known.read_text()), facts) if known.is_file() else {}
    hashes = [name for name in ("data", "vocabulary") if name in facts_changed]
    changed += [f"{name} {facts_changed.pop(name)} (hash)" for name in hashes]
    if changed:
        raise ConfigError(
            f"{title} cannot continue with changed {', '.join(changed)}; restore it, or {another}"
        )
    return [
        *([change] if change else []),
        *(f"{name} {new}" for name, new in facts_changed.items()),
    ]


class CampaignCallback(tune.Callback):  # type: ignore[misc]
    """Actions when a trial starts, is restarted or ends; raises Interrupted after a signal."""

    def __init__(self, campaign: Campaign, number: int) -> None:
        self._campaign, self._history, self._number = campaign, campaign.history, number

    def on_trial_start(self, trial: TuneTrial, **_info: Any) -> None:
        self._history.add("started", str(trial), values=trial.config["values"])

    def on_trial_result(self, trial: TuneTrial, result: Any, **_info: Any) -> None:
        """Note a trial's last report, which its scheduler does not get."""
        if result[DONE] and END_KEY not in result:
            self._history.add_report(str(trial), {"values": trial.config["values"], **result})

    def on_trial_complete(self, trial: TuneTrial, **_info: Any) -> None:
        end = {"state": "finished" if trial.last_result.get(DONE) else "stopped"}
        self._add_end(trial, **trial.last_result.get(END_KEY, end))

    def on_trial_recover(self, trial: TuneTrial, **_info: Any) -> None:
        """Log it; the loss of a preempted node does not count as a failure."""
        if getattr(_raised(trial), "preempted", False):
            trial.max_failures += 1
        self._campaign.log(
            f"trial {trial} lost its process ({_cause(trial)}); starting another one"
        )

    def on_trial_error(self, trial: TuneTrial, **_info: Any) -> None:
        self._add_end(trial, state="failed", error=_cause(trial))

    def on_step_end(self, trials: list[TuneTrial], **_info: Any) -> None:
        self._campaign.lease.check()
        if self._campaign.signals.stop.is_set():
            for trial in trials:
                if (actor := trial.temporary_state.ray_actor) is not None:
                    ray.kill(actor)
            raise Interrupted(_INTERRUPTED)

    def _add_end(self, trial: TuneTrial, **details: Any) -> None:
        self._history.add("ended", str(trial), **details)
        counts = counts_text(self._history.trials())
        self._campaign.log(f"trial {trial} {details['state']} | {counts} of {self._number}")


def _raised(trial: TuneTrial) -> Exception | None:
    """Return what ended a trial's process, or None if it never started."""
    if not trial.pickled_error_file:  # a local file, also with an object store
        return None
    raised: Exception = ray.cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    return raised


def _cause(trial: TuneTrial) -> str:
    raised = _raised(trial)
    return "Ray Tune could not start it" if raised is None else root_cause(raised)
