"""One rank of a run: `train_rank` trains it and yields its events."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import ray.train
import ray.train.torch
import torch

from raytrain_gpt.checkpoint.catalog import resume_step
from raytrain_gpt.checkpoint.code_check import check_same_code
from raytrain_gpt.checkpoint.collectives import Collectives, DelayedFlags
from raytrain_gpt.cluster.compilers import check_compiler
from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import (
    TimedContext,
    device_name,
    environment_changes,
    numerics_environment,
    peak_flops,
    seed_everything,
)
from raytrain_gpt.core.loop import StepResult, train_steps, warm_up_ddp_buckets
from raytrain_gpt.core.memory import USABLE_FRACTION
from raytrain_gpt.core.optim import learning_rate
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.core.state import has_finite_parameters
from raytrain_gpt.errors import Diverged, UserError
from raytrain_gpt.evaluate.evaluation import Evaluation, watched
from raytrain_gpt.events import Evaluated, Events, Exited, Outbox, Samples
from raytrain_gpt.format import count
from raytrain_gpt.ingest.feed import EvalFeed, TrainFeed, to_device
from raytrain_gpt.ingest.ray_dataset import chunks_in_process, rank_chunks, ray_chunks
from raytrain_gpt.train.checkpointing import WRITE_TIMEOUT_S, Checkpointing
from raytrain_gpt.train.model_setup import Sharded, set_up_training
from raytrain_gpt.train.profile import StepProfile
from raytrain_gpt.train.step_log import StepLog
from raytrain_gpt.train.worker_group import RankJob


@dataclass(frozen=True)
class StepActions:
    """Actions after a step, executed in field order.

    Attributes:
        flush: Reduce and report results; `all` waits for the device, `late` covers only the steps up
            to the previous flush.
        evaluate: Compute the metrics of an evaluation, which the last step always has.
        save: Write a checkpoint, normally after the evaluation, to include its validation loss.
            A preempted or stopped rank does this first, as its node may be gone in seconds.
        await_scheduler: Wait for the sweep's decision on this trial.
    """

    flush: Literal["no", "late", "all"]
    evaluate: bool
    save: Literal["no", "before_evaluation", "after_evaluation"]
    await_scheduler: bool


def step_actions(
    step: int, config: Config, *, leaving: bool, profile_edge: bool, is_trial: bool
) -> StepActions:
    """Decide the actions after a step.

    Args:
        leaving: Whether the ranks must save a checkpoint and exit.
        profile_edge: A profile starts or ends here, so earlier rows need separate timings.
        is_trial: A sweep decides after every evaluation but the last.
    """
    train = config.train
    is_last = step == train.max_steps
    evaluate = is_last or step % config.eval.eval_every_steps == 0
    save = is_last or leaving or step % train.checkpoint_every_steps == 0
    first = leaving and not is_last
    log = step % train.log_every_steps == 0
    return StepActions(
        flush="all" if evaluate or save or profile_edge else "late" if log else "no",
        evaluate=evaluate,
        save="no" if not save else "before_evaluation" if first else "after_evaluation",
        await_scheduler=is_trial and evaluate and not is_last and not leaving,
    )


def train_rank(job: RankJob) -> Events:
    """Train one rank from the resumed step until the last step or a request to exit, yielding its events."""
    rank = Rank(job)
    yield from rank.outbox.take()
    try:
        rank.begin()
        yield from rank.outbox.take()
        for result in rank.steps():
            rank.record(result)
            rank.exchange_requests()
            actions = step_actions(
                result.step,
                job.plan.config,
                leaving=rank.stop_requested,
                profile_edge=rank.profile.is_edge(result.step),
                is_trial=job.is_trial,
            )
            if actions.flush != "no":
                rank.flush(late=actions.flush == "late")
            if actions.save != "no":
                rank.check_weights()
            if rank.log.bad_streak:  # only now is it known; bad steps are not saved
                break
            if actions.save == "before_evaluation":
                rank.save_checkpoint()
            if actions.evaluate:
                rank.evaluate()
            if actions.save == "after_evaluation":
                rank.save_checkpoint()
            if actions.await_scheduler:
                rank.checkpoints.collect()
            yield from rank.outbox.take()
            if actions.await_scheduler:
                started = time.perf_counter()
                rank.decided(continues=bool((yield Evaluated())))
                rank.log.exclude_time(time.perf_counter() - started)
            if rank.stop_requested:
                break
    except Exception:
        rank.outbox.rows([], force=True)
        yield from rank.outbox.take()
        raise
    except GeneratorExit:
        rank.checkpoints.collect()
        raise
    rank.finish()
    yield from rank.outbox.take()


class Rank:
    """One rank: model, data and reporting."""

    def __init__(self, job: RankJob) -> None:
        self.job, self.config, self.link = job, job.plan.config, job.link
        train = self.config.train
        context = ray.train.get_context()
        # Ranks wait for each other's checkpoint files for as long as the storage may be unreachable.
        self.collectives = Collectives(
            context.get_world_rank(),
            context.get_world_size(),
            self.config.cluster.torch_timeout_s,
            self.config.run.retry_for_s + WRITE_TIMEOUT_S,
        )
        self.agreement = DelayedFlags(self.collectives)
        rank = self.collectives.rank
        check_same_code(self.config, self.collectives)
        self.outbox = Outbox(rank)
        self.step = resume_step(job.resumed)
        self._first_step = self.step + 1
        cpus = self.config.cluster.num_cpus
        torch.set_num_threads(cpus)
        # By default each rank would compile with up to 32 processes.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cpus))
        seed_everything(train.seed, rank)
        # In local mode Ray Train uses a GPU whenever it sees one.
        use_gpu = self.config.cluster.num_gpus > 0
        device = ray.train.torch.get_device() if use_gpu else torch.device("cpu")
        if use_gpu:
            assert device.index == torch.cuda.current_device(), "Ray Train sets it in this thread"
            # One that shares its GPU must leave memory to the others.
            share = self.config.cluster.gpus_per_worker
            limit = share * USABLE_FRACTION if share < 1 else 1.0
            torch.cuda.set_per_process_memory_fraction(limit)
        check_compiler(self.config, use_gpu, f"node {socket.gethostname()}")
        self.setup = set_up_training(job.plan, job.data, job.resumed, device, self.collectives)
        self.feed, self.evaluation = self._open_feeds()
        take = self.outbox.add if rank == 0 else None
        self.profile = StepProfile(train.profile_steps, self.step, train.max_steps, device, take)
        self._forward = TimedContext(self.setup.autocast, device)
        self._device_name = device_name(device)
        self.log = StepLog(
            job.ingest,
            job.rows_before,
            self.collectives,
            self.feed,
            flops_per_token=count_model(self.setup.raw_model.shape).flops_per_token,
            peak_flops=peak_flops(self._device_name, self.setup.precision),
            device=device,
            slowed=self.profile.slowed,
        )
        self.checkpoints = Checkpointing(job, self.setup, self.log, self.collectives, self.outbox)
        self._evaluated: Row = {}
        self._exit_reason: Literal["stopped", "preempted"] | None = None
        self.outbox.line(
            f"{self._device_name} on {socket.gethostname()}, {count(torch.get_num_threads(), 'thread')}, "
            f"{self.setup.precision}, {job.plan.worker_sequences} of {self.config.batch_sequences} "
            "sequences per step"
        )
        if use_gpu and train.precision == "auto" and self.setup.precision == "fp32" and rank == 0:
            self.outbox.line(
                f"precision fp32, as {self._device_name} has no bf16; with tensor cores, precision=fp16 "
                "and its loss scale are faster"
            )
        self._warn_of_changes()

    def _warn_of_changes(self) -> None:
        """Warn of another precision, and with exact sums of another device, thread count or software."""
        here = numerics_environment(self.setup.device, self.setup.precision)
        resumed = self.job.resumed
        before = (resumed.state.numerics_environment if resumed else None) or here
        for rank, environment in enumerate(self.collectives.all_gather_json(here, dict[str, str])):
            names = environment if self.config.train.exact else ("precision",)
            changed = environment_changes(before, {name: environment[name] for name in names})
            if changed and self.collectives.rank == 0:
                what = "exact does not hold" if self.config.train.exact else "other rounding"
                self.outbox.line(
                    f"{what} from step {self.step}: {changed} on rank {rank}; weights are no longer "
                    "guaranteed to be bit-identical"
                )

    def _open_feeds(self) -> tuple[TrainFeed, Evaluation]:
        setup, micro = self.setup, self.job.plan.micro_batch_sequences
        ingest, rank = self.job.ingest, self.collectives.rank
        if self.config.cluster.is_local:
            received = chunks_in_process(ingest, self.config.train.max_steps - self.step, rank)
        else:
            received = ray_chunks(ray.train.get_dataset_shard("train"), ingest)
        chunks = rank_chunks(received, ingest, rank)
        val = next(chunks)
        evaluation = Evaluation(
            self.config,
            setup.eval_model,
            setup.tokenizer,
            EvalFeed(val.tokens[0], val.ids[0], ingest.data, micro, setup.device),
            self.collectives,
            setup.autocast,
        )
        return TrainFeed(chunks, micro, setup.device), evaluation

    def begin(self) -> None:
        """Warm up, and tell that training starts, unless the ranks must exit."""
        setup, train = self.setup, self.config.train
        if self.collectives.world_size > 1 and not train.exact:
            # Made like all later inputs, since others would compile more graphs.
            shape = (self.job.plan.micro_batch_sequences, self.config.data.seq_len + 1)
            zeros = to_device(np.zeros(shape, np.uint16), setup.device)
            warm_up_ddp_buckets(setup.model, zeros, setup.autocast)
        self.exchange_requests()
        if not self.stop_requested:
            self.link.work()
            self.outbox.note(
                self.step,
                "resume" if self.job.resumed else "start",
                num_workers=self.collectives.world_size,
                device=self._device_name,
                threads=torch.get_num_threads(),
                precision=setup.precision,
                micro_batch_sequences=self.job.plan.micro_batch_sequences,
                activation_checkpointing=self.job.plan.activation_checkpointing,
            )

    def steps(self) -> Iterator[StepResult]:
        """Train, yielding the result of every remaining step."""
        setup, train, optim = self.setup, self.config.train, self.config.optim
        if self.stop_requested:
            return
        # Sharded ranks wait for each other in the forward pass too.
        times_forward = self.collectives.world_size > 1 and not isinstance(setup.strategy, Sharded)
        self.log.start_clock()
        results = train_steps(
            setup.model,
            setup.optimizer,
            watched(self.feed.micro_batches(), self.link.work),
            setup.strategy.accumulation(setup.model, self.job.plan.micro_batches_per_step),
            first_step=self.step,
            max_steps=train.max_steps,
            learning_rate=lambda step: learning_rate(step, optim, train.max_steps),
            grad_clip=optim.grad_clip,
            autocast=self._forward if times_forward else setup.autocast,
            seed=train.seed,
            loss_scale=setup.loss_scale,
        )
        yield from self.profile.record_steps(results)

    def record(self, result: StepResult) -> None:
        """Add a result without reading it from the device."""
        if result.step == self._first_step and not self.config.cluster.is_local:
            gc.collect()
            gc.freeze()  # one rank's long collection would keep all others waiting
        self.step = result.step
        self.log.add(result, self._forward.take())

    def flush(self, late: bool) -> None:
        """Reduce results over the ranks and report them; being late gains nothing on a CPU."""
        rows = self.log.flush(late and self.setup.device.type == "cuda")
        for row in rows:
            if row.get("event") == "nonfinite":
                self.outbox.line(f"step {row['step']}: not finite, update skipped")
        self.checkpoints.add_rows(rows)
        self.outbox.rows(rows, force=self.step == self.config.train.max_steps)

    def check_weights(self) -> None:
        """Roll back if a rank's weights are not finite, since a checkpoint of them would count as good.

        Raises:
            Diverged: they are not, in a trial or without `spike_detection`.
        """
        if self.log.bad_streak:
            return
        started = time.perf_counter()
        is_bad = not has_finite_parameters(self.setup.raw_model)
        (is_bad,) = self.collectives.any_later(is_bad)()
        self.log.exclude_time(time.perf_counter() - started)
        if not is_bad:
            return
        line = f"weights are not finite after step {self.step}, so they are not saved"
        if self.job.is_trial or not self.config.spikes.spike_detection:
            raise Diverged(f"{line}; start again under another run_name with a lower peak_lr")
        self.outbox.line(line)
        self.log.reject_weights(self.step)

    def evaluate(self) -> None:
        """Report metrics over all ranks, and samples; excluded from training time."""
        started, setup = time.perf_counter(), self.setup
        with setup.strategy.full_weights(setup.raw_model, setup.eval_model):
            try:
                metrics = self.evaluation.metrics(self.link.work)
            except UserError:  # raised on all ranks; a trial would never repeat the evaluation
                if not self.job.is_trial:
                    self.check_weights()
                    if not self.log.bad_streak:
                        self.save_checkpoint()
                        self.checkpoints.collect()
                raise
            row = {"step": self.step, **metrics, "perf/eval_s": time.perf_counter() - started}
            self._evaluated = row
            self.checkpoints.add_rows([row])
            self.outbox.rows([row], force=True)
            if self.collectives.rank == 0 and self.config.eval.num_samples:
                self.outbox.add(Samples(self.step, self.evaluation.samples()))
        self.log.exclude_time(time.perf_counter() - started)

    def save_checkpoint(self) -> None:
        """Copy the state; a thread writes it while training continues."""
        is_evaluated = self._evaluated.get("step") == self.step
        self.checkpoints.begin(self.step, self._evaluated["val/loss"] if is_evaluated else None)
        self.agreement.reset()  # its pending flags predate this checkpoint

    @property
    def stop_requested(self) -> bool:
        """Whether the ranks were asked to exit; the same on all of them."""
        return self._exit_reason is not None

    def exchange_requests(self) -> None:
        """Exchange requests, which arrive a step late, and act on them; all ranks call it every step.

        All ranks must exit, or collect a checkpoint that each has written, in the same step.
        """
        link = self.link
        flags = (link.stop.is_set(), link.is_preempted, self.checkpoints.writing)
        stop, is_preempted, writing = self.agreement.exchange(*flags)
        if not writing:
            self.checkpoints.collect()
        if stop and not self.stop_requested:
            self._exit_reason = "preempted" if is_preempted else "stopped"
            link.stop.set()  # in local mode, also stops ranks that got no signal

    def decided(self, continues: bool) -> None:
        """Take the sweep's decision on the last evaluation."""
        self.link.work()  # the wait was not a hang
        if not continues:
            self._exit_reason = "preempted" if self.link.is_preempted else "stopped"

    def finish(self) -> None:
        """Wait for the checkpoint in flight, and tell how this rank ends."""
        self.agreement.reset()
        self.checkpoints.collect()
        self.outbox.rows([], force=True)
        done = self.step == self.config.train.max_steps
        self.outbox.add(Exited(None if done else self._exit_reason, self.log.bad_streak))
