"""What a worker does after a step: a small value that all ranks compute alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain_gpt.checkpoint.catalog import is_evaluated
from raytrain_gpt.config.schema import Config


@dataclass(frozen=True)
class StepActions:
    """What follows a step, in the order of the fields.

    Attributes:
        flush: Reduce and report what is pending: the one wait for the device.
        evaluate: Compute the metrics here; an async evaluation needs a checkpoint instead.
        save: Write a checkpoint; normally it comes second, so that its state has the validation loss.
            A rank that must leave saves first: its node may be gone in seconds.
        await_scheduler: Wait until the sweep says whether this trial goes on.
        leave: This was the last step of this attempt.
    """

    flush: bool
    evaluate: bool
    save: Literal["no", "before_evaluation", "after_evaluation"]
    await_scheduler: bool
    leave: bool


def step_actions(
    step: int, config: Config, *, leaving: bool, profile_edge: bool, is_trial: bool
) -> StepActions:
    """What follows a step.

    Args:
        step: Updates done.
        config: When to log, evaluate and save.
        leaving: The ranks were asked to save and leave.
        profile_edge: A profile begins or ends here, so that rows before it have times of their own.
        is_trial: A sweep decides after every evaluation but the last.
    """
    train = config.train
    is_last = step == train.max_steps
    evaluation_due = is_evaluated(step, config.eval.eval_every_steps, train.max_steps)
    is_async = config.eval.eval_mode == "async"
    evaluate = evaluation_due and not is_async
    save = (
        is_last
        or leaving
        or step % train.checkpoint_every_steps == 0
        or (evaluation_due and is_async)
    )
    first = leaving and not is_last
    return StepActions(
        flush=evaluate or save or profile_edge or step % train.log_every_steps == 0,
        evaluate=evaluate,
        save="no" if not save else "before_evaluation" if first else "after_evaluation",
        await_scheduler=is_trial and evaluate and not is_last and not leaving,
        leave=leaving,
    )
