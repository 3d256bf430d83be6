"""Optimizers of a user's file, and the job that trains with them on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.accumulation import ExactAccumulator
from raytrain_gpt.core.parallel import full_tensor
from raytrain_gpt.core.registry import build_optimizer, new_model
from tests import training
from tests.core.sharded import BAD_STEP, SHAPE, STEPS, Case, Trained, batch_of

CODE = Code(
    "my.py",
    """
import torch
from collections import defaultdict
from raytrain_gpt.extend import Field, Settings, optimizer

class LionSettings(Settings):
    lion_beta: float = Field(0.99, gt=0, lt=1)

class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr, beta=0.99):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.add_(state["momentum"].lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                state["momentum"].lerp_(p.grad, 1 - group["beta"])

@optimizer("lion", LionSettings, elementwise=True)
def lion(parameters, settings, peak_lr):
    return Lion(parameters, peak_lr, settings.lion_beta)

class Varied(Lion):
    '''State of many types, and numbers of the group that it changes or adds.'''

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["beta"] *= 0.9
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["half"] = (p * state["count"]).bfloat16()
                state["small"] = torch.full_like(p, state["count"], dtype=torch.int8)
                state["scales"] = [float(p.sum()), None, True]
                p.add_(state["half"].float(), alpha=1e-3 * group["beta"] / group["steps"])

@optimizer("varied")
def varied(parameters, settings, peak_lr):
    return Varied(parameters, peak_lr)

class Renewed(Lion):
    def step(self, closure=None):
        super().step()
        new = {p: {"momentum": state["momentum"].clone()} for p, state in self.state.items()}
        self.state = defaultdict(dict, new)

@optimizer("renewed")
def renewed(parameters, settings, peak_lr):
    return Renewed(parameters, peak_lr)

@optimizer("two_rates")
def two_rates(parameters, settings, peak_lr):
    groups = [{"params": parameters[:1], "lr": 10 * peak_lr}, {"params": parameters[1:]}]
    return torch.optim.SGD(groups, lr=peak_lr)

@optimizer("rate_in_tensor")
def rate_in_tensor(parameters, settings, peak_lr):
    return torch.optim.AdamW(parameters, torch.tensor(2 * peak_lr), foreach=False)

@optimizer("no_rate")
def no_rate(parameters, settings, peak_lr):
    return Lion(parameters, None)

@optimizer("forgets")
def forgets(parameters, settings, peak_lr):
    return torch.optim.SGD(parameters[1:], peak_lr)

@optimizer("other")
def other(parameters, settings, peak_lr):
    return 3

@optimizer("raises")
def raises(parameters, settings, peak_lr):
    return parameters[0].no_such_attribute
""",
)


def own_section(**fields: Any) -> OptimSection:
    return OptimSection.model_validate(fields, context=Registry(CODE))


def train_foreign(directory: Path) -> dict[str, Any]:
    """Train on three ranks, straight and resumed after the bad step; then with exact sums on 1 and 2."""
    found: dict[str, Any] = {}
    for name, sharded in (("lion", False), ("lion", True), ("varied", False)):
        case, key = Case(optim=own_section(optimizer=name)), f"{name} {sharded}"
        straight, cut = Trained(case, sharded), Trained(case, sharded)
        straight.train(0, STEPS, BAD_STEP)
        cut.train(0, BAD_STEP, BAD_STEP)
        (directory / key).mkdir(exist_ok=True)
        cut.save(directory / key)
        dist.barrier()
        resumed = Trained(case, sharded, from_checkpoint=directory / key)
        resumed.train(BAD_STEP, STEPS)
        moments = [s["momentum"] for s in straight.optimizer.state.values()]
        found[key] = {
            "straight": straight.weights(),
            "resumed": resumed.weights(),
            "kept": straight.kept_numbers(),
            "momenta": [full_tensor(moment).clone() for moment in moments],
        }
    pair = dist.new_group([1, 2])
    found["exact"] = _trained_exactly(None if straight.rank == 0 else pair)
    return found


def _trained_exactly(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Weights after training on 4 micro-batches per step, all of one rank or shared by two."""
    model = new_model(SHAPE)
    model.init_weights(0)
    parameters = [*model.parameters()]
    rank, num = (0, 4) if group is None else (group.rank(), 2)
    batches = (batch_of(4 * step + num * rank + n, 0) for step in range(STEPS) for n in range(num))
    optimizer = build_optimizer(model, own_section(optimizer="lion"), group=group)
    sums = ExactAccumulator(parameters, num, group)
    for _ in training.steps(model, optimizer, batches, STEPS, accumulator=sums):
        pass
    return [p.detach() for p in parameters]
