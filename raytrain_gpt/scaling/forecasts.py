"""Forecasts of a study: the best run for a compute, doubts about it, and `best.yaml`."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_gpt.format import amount
from raytrain_gpt.scaling.law_file import LawFile
from raytrain_gpt.scaling.plan import MAX_EXTRAPOLATION, Size, StudyPlan

BEST_FILE = "best.yaml"
_BUDGETS = (1, 3, 10, 30)
"""Budgets in the table, as multiples of the largest run's compute."""
_EVALUATIONS = 20


@dataclass(frozen=True)
class BestRun:
    """A run at the optimum of a law."""

    size: Size
    steps: int
    tokens: int
    peak_lr: float
    loss: float

    @property
    def compute(self) -> float:
        return 6 * self.size.parameters * self.tokens


@dataclass(frozen=True)
class Forecasts:
    """Forecasts of a study."""

    plan: StudyPlan
    file: LawFile

    def best(self, compute: float | None = None) -> BestRun:
        """Return the best run for a compute in FLOPs, by default the study's target."""
        parameters, tokens = self.file.optimal(compute or self.plan.study.target.compute)
        size, batch = self.plan.size_near(parameters), self.plan.batch_tokens
        # The nearest shape differs from the optimum; the compute is kept.
        steps = max(1, round(tokens * parameters / size.parameters / batch))
        loss = float(self.file.predict(size.parameters, steps * batch))
        return BestRun(size, steps, steps * batch, self.file.rule.rate(size.parameters), loss)

    def table(self) -> list[list[str]]:
        """Return rows of cells, the first with the names, for several budgets and the target."""
        runs = [self.best(self.file.largest_compute * times) for times in _BUDGETS]
        rows = [["FLOPs", "parameters", "tokens", "batch", "peak rate", "loss"]]
        for run in sorted([*runs, self.best()], key=lambda run: run.compute):
            size = amount(run.size.parameters), amount(run.tokens), f"{self.plan.batch_tokens:,}"
            loss = self.file.loss_text(run.loss)
            rows.append([f"{run.compute:.2g}", *size, f"{run.peak_lr:g}", loss])
        return rows

    def objection(self) -> str:
        """Return why no run should be planned with this law, or ""."""
        best, file = self.best(), self.file
        times = file.times(best.size.parameters, best.tokens)
        if times > MAX_EXTRAPOLATION:
            return f"the target has {times:.0f} times the compute of the largest run"
        if file.half_width is None:
            return "too few runs are left for a hold-out"
        lowest = min(run.loss for run in file.fitted if run.loss is not None)
        if times > 1 and best.loss + file.half_width > lowest:
            interval = file.loss_text(best.loss)
            return f"its interval, {interval}, reaches the lowest loss of the runs, {lowest:.3f}"
        return ""

    def summary(self) -> list[str]:
        """Return two lines on the run for the target."""
        best = self.best()
        size, tokens = amount(best.size.parameters), amount(best.tokens)
        return [
            f"By {self.file.study}, for {best.compute:.3g} FLOPs: {size} parameters (FLOPs per token / 6) "
            f"and {tokens} tokens.",
            f"Expected validation loss: {self.file.loss_text(best.loss)} nats per token.",
        ]

    def best_yaml(self) -> str:
        """Format the configuration of the run for the target, for `train --config`."""
        best, plan, name = self.best(), self.plan, self.file.study
        every = max(1, best.steps // _EVALUATIONS)
        often = {"eval_every_steps": every, "checkpoint_every_steps": every}
        spikes = {"spike_detection": plan.study.base.load().spikes.spike_detection}
        length = {"peak_lr": best.peak_lr, "max_steps": best.steps, "run_name": f"{name}-best"}
        config = plan.base.updated({**best.size.fields, **length, **often, **spikes})
        return "".join(f"# {line}\n" for line in self.summary()) + config.to_yaml()
