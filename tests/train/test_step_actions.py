"""What a worker does after a step, against the rule as it was first written: a loop with booleans."""

from __future__ import annotations

from itertools import product

import pytest

from raytrain_gpt.checkpoint.catalog import is_evaluated
from raytrain_gpt.config.schema import Config
from raytrain_gpt.train.step_actions import StepActions, step_actions

MAX_STEPS = 24


def by_the_loop(
    step: int, config: Config, leave: bool, profile_edge: bool, is_trial: bool
) -> list[str]:
    """The first version of the worker's loop, with what it calls written down."""
    train, evaluation, done = config.train, config.eval, list[str]()
    last = step == train.max_steps
    due = is_evaluated(step, evaluation.eval_every_steps, train.max_steps)
    evaluates_async = evaluation.eval_mode == "async"
    evaluate = due and not evaluates_async
    save = last or leave or step % train.checkpoint_every_steps == 0 or (due and evaluates_async)
    log = step % train.log_every_steps == 0 or profile_edge
    if evaluate or save or log:
        done.append("flush")
    if leave and not last:
        done.append("save")
    if evaluate:
        done.append("evaluate")
    if save and (last or not leave):
        done.append("save")
    if not leave and evaluate and not last and is_trial:
        done.append("await_scheduler")
    if leave:
        done.append("leave")
    return done


def by_the_value(actions: StepActions) -> list[str]:
    """The order in which `train_worker` executes a value."""
    flags = [
        ("flush", actions.flush),
        ("save", actions.save == "before_evaluation"),
        ("evaluate", actions.evaluate),
        ("save", actions.save == "after_evaluation"),
        ("await_scheduler", actions.await_scheduler),
        ("leave", actions.leave),
    ]
    return [name for name, is_due in flags if is_due]


@pytest.mark.parametrize("eval_mode", ["inline", "async"])
@pytest.mark.parametrize(("log", "save", "evaluate"), product((1, 3, 100), (4, 24, 100), (6, 100)))
def test_every_step_of_every_rhythm(eval_mode: str, log: int, save: int, evaluate: int) -> None:
    config = Config().updated(
        {
            "max_steps": MAX_STEPS,
            "log_every_steps": log,
            "checkpoint_every_steps": save,
            "eval_every_steps": evaluate,
            "eval_mode": eval_mode,
        }
    )
    for step, *flags in product(range(1, MAX_STEPS + 1), *[(False, True)] * 3):
        leaving, profile_edge, is_trial = flags
        actions = step_actions(
            step, config, leaving=leaving, profile_edge=profile_edge, is_trial=is_trial
        )
        assert by_the_value(actions) == by_the_loop(step, config, *flags), (step, flags)


def test_the_last_step_is_evaluated_then_saved_and_asks_nobody() -> None:
    config = Config().updated({"max_steps": 7})
    for leaving in (False, True):
        actions = step_actions(7, config, leaving=leaving, profile_edge=False, is_trial=True)
        assert actions == StepActions(True, True, "after_evaluation", False, leaving)


def test_a_rank_that_must_leave_saves_before_it_evaluates() -> None:
    config = Config().updated({"max_steps": 7, "eval_every_steps": 3})
    actions = step_actions(3, config, leaving=True, profile_edge=False, is_trial=True)
    assert actions == StepActions(True, True, "before_evaluation", False, True)
