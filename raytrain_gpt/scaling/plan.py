"""The runs of a study, as pure functions of its file.

Each size has a trunk, a straight run of the longest length, and a cooldown for each shorter length: a branch
from the trunk's checkpoint at which the rate of a straight run of that length starts to fall. So a cooldown
is bit-identical to that straight run, and four lengths cost 47 tokens per parameter instead of 75.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pydantic import PositiveFloat

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.config.schema import Config, check_kinds
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.data.locations import data_is_there, read_data
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import amount, count, table
from raytrain_gpt.scaling.study_file import LEAST, Study
from raytrain_gpt.sweep.cost import one_worker_for_auto, time_line
from raytrain_gpt.train.preflight import expected_vocab_size

_DECAY_FRACTION = 0.2
_WHOLE_DECAYS = 5
"""Lengths are multiples of this many steps, so that decays have an integer number of steps."""
_DEFAULT_NUM_SIZES, _LARGEST_SHARE = 5, 1 / 10
"""Sizes, and compute of the largest run as a fraction of the target's, if the file has none."""
MAX_EXTRAPOLATION = 30
"""Maximum compute of a forecast, as a multiple of the largest run's."""
MAX_EPOCHS = 4
"""More repetitions of data are worth less than new tokens (Muennighoff et al., 2023)."""
_MAX_WARMUP = 1 / 10
_ASPECT_WEIGHT = 0.25
_MAX_LAYERS, _MAX_HEADS = 512, 4096


@dataclass(frozen=True)
class Size:
    """A model of the ladder."""

    parameters: float
    """FLOPs per token / 6, so that head and attention count."""
    shape: tuple[int, int, int]
    """Layers, heads, channels."""

    @property
    def fields(self) -> dict[str, int]:
        return dict(zip(("num_layers", "num_heads", "embd_size"), self.shape, strict=True))


def size_near(base: Config, vocab_size: int, parameters: float) -> Size:
    """Find the shape nearest to a size with the head size of `base` and about its width per layer.

    Raises a ConfigError if no shape has about this size.
    """
    model = base.model
    head_size, aspect = model.embd_size // model.num_heads, model.embd_size / model.num_layers
    of_base = GPTShape.of(base, vocab_size)

    def size(num_layers: int, num_heads: int) -> Size:
        size = num_layers, num_heads, num_heads * head_size
        shape = replace(of_base, num_layers=num_layers, num_heads=num_heads, embd_size=size[-1])
        return Size(count_model(shape).flops_per_token / 6, size)

    def distance(size: Size) -> float:
        change = math.log(size.shape[2] / size.shape[0] / aspect)
        return abs(math.log(size.parameters / parameters)) + _ASPECT_WEIGHT * abs(change)

    def in_proportion(num_layers: int) -> float:
        return size(num_layers, max(1, round(aspect * num_layers / head_size))).parameters

    middle = 1 + bisect_left(range(1, _MAX_LAYERS), parameters, key=in_proportion)
    candidates = []
    for layers in range(max(1, middle - 2), middle + 3):
        heads = range(1, _MAX_HEADS)
        above = 1 + bisect_left(heads, parameters, key=lambda n: size(layers, n).parameters)
        candidates += [size(layers, near) for near in {max(1, above - 1), above}]
    best = min(candidates, key=distance)
    if not 1 / 2 < best.parameters / parameters < 2:
        raise ConfigError(
            f"no model with heads of {head_size} channels has about {amount(parameters)} parameters; change "
            "sizes, or num_heads in overrides"
        )
    return best


class RunResult(Strict):
    """A run of the study; `left_out` is why the law ignores it, or "" if it does not."""

    name: str
    role: str
    parameters: PositiveFloat
    tokens: PositiveFloat
    peak_lr: PositiveFloat
    loss: float | None = None
    left_out: str = ""


@dataclass(frozen=True)
class PlannedRun:
    name: str
    size: Size
    tokens: int
    values: dict[str, Any]
    """Field -> value, in addition to the base's."""
    trunk: str
    """Run that it branches from, or ""."""
    own_steps: int
    """Steps that it trains itself."""

    def result(self, loss: float | None, left_out: str = "") -> RunResult:
        return RunResult(
            name=self.name,
            role=self.name.partition("-")[0],
            parameters=self.size.parameters,
            tokens=self.tokens,
            peak_lr=self.values["peak_lr"],
            loss=loss,
            left_out=left_out,
        )


@dataclass(frozen=True)
class StudyPlan:
    """The runs of a study; `base` is its `study_base`."""

    study: Study
    base: Config
    vocab_size: int

    def size_near(self, parameters: float) -> Size:
        return size_near(self.base, self.vocab_size, parameters)

    @cached_property
    def sizes(self) -> list[Size]:
        """Models, smallest first; raises a ConfigError if the shapes are too coarse for the sizes."""
        given = self.study.sizes
        if given is None:
            longest = self.study.tokens_per_parameter[-1]
            largest = math.sqrt(self.study.target.compute * _LARGEST_SHARE / 6 / longest)
            given = tuple(largest / 2**k for k in reversed(range(_DEFAULT_NUM_SIZES)))
        sizes = [self.size_near(parameters) for parameters in given]
        different, span = {size.shape for size in sizes}, sizes[-1].parameters / sizes[0].parameters
        number, ratio = LEAST["sizes"]
        if len(different) < max(number, len(sizes)) or span < ratio:
            shown = ", ".join(amount(size.parameters) for size in sizes)
            raise ConfigError(
                f"nearest shapes have {shown} parameters: {len(different)} sizes, a factor of {span:.1f}; "
                f"a law needs {number} and {ratio}; raise num_heads in overrides for more shapes"
            )
        return sizes

    @property
    def batch_tokens(self) -> int:
        return self.base.train.global_batch_tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.study.tokens_per_parameter

    def steps(self, size: Size, length: int) -> int:
        unit = self.lengths[0] * size.parameters / self.batch_tokens / _WHOLE_DECAYS
        return _WHOLE_DECAYS * max(1, round(unit)) * (length // self.lengths[0])

    @property
    def largest_compute(self) -> float:
        largest = self.sizes[-1]
        return 6 * largest.parameters * self.steps(largest, self.lengths[-1]) * self.batch_tokens

    def rate_runs(self, index: int, rates: Sequence[float]) -> list[PlannedRun]:
        """Return the runs of a size with different peak rates, of the middle length."""
        size = self.sizes[index]
        steps, name = self.steps(size, self.lengths[len(self.lengths) // 2]), f"rate-{index + 1}"
        return [self.run(f"{name}-{rate:g}", size, steps, peak_lr=rate) for rate in rates]

    def ladder(self, rates: Sequence[float]) -> list[PlannedRun]:
        """Return trunks, largest first, and cooldowns, smallest first, so that few wait for a trunk.

        `rates` has the peak rate of each size.
        """
        trunks, cooldowns = [], []
        *shorter, longest = self.lengths
        for number in range(len(self.sizes), 0, -1):
            size, rate = self.sizes[number - 1], rates[number - 1]
            steps = self.steps(size, longest)
            every = _before_decay(self.steps(size, shorter[0]))
            saved: dict[str, Any] = {
                "checkpoint_every_steps": every,
                "keep_checkpoints": -(-steps // every),
            }
            trunk = self.run(f"size-{number}-{longest}", size, steps, peak_lr=rate, **saved)
            trunks.append(trunk)
            for length in shorter:
                steps, name = self.steps(size, length), f"size-{number}-{length}"
                cooldowns.append(self.run(name, size, steps, trunk=trunk.name, peak_lr=rate))
        return [*trunks, *reversed(cooldowns)]

    def run(
        self, name: str, size: Size, steps: int, *, trunk: str = "", **values: Any
    ) -> PlannedRun:
        """Return a straight run of a size, or one that branches from a trunk."""
        start = _before_decay(steps) if trunk else 0
        # A crash loses at most a tenth.
        values = {"checkpoint_every_steps": -(-steps // 10), "keep_checkpoints": 2, **values}
        values |= {**size.fields, "max_steps": steps, "eval_every_steps": steps}
        if trunk:
            values["branch_from"] = f"{trunk}@{start}"
        return PlannedRun(name, size, steps * self.batch_tokens, values, trunk, steps - start)

    def check(self, train_tokens: int | None) -> None:
        """Raise a ConfigError if a run is impossible, or the study could not determine a law.

        `train_tokens` is None if the data does not exist yet.
        """
        shortest = self.steps(self.sizes[0], self.lengths[0])
        if (warmup := self.base.optim.warmup_steps) > _MAX_WARMUP * shortest:
            raise ConfigError(
                f"warmup_steps={warmup} is above a tenth of the shortest run, {count(shortest, 'step')}; set "
                f"it to {int(_MAX_WARMUP * shortest)} or less in overrides, or lower global_batch_tokens"
            )
        longest = self.steps(self.sizes[-1], self.lengths[-1]) * self.batch_tokens
        check_epochs("the longest run", longest, train_tokens)
        check_extrapolation(self.study.target.compute / self.largest_compute)
        rates = self.study.peak_lrs
        for run in (*self.rate_runs(0, rates), *self.ladder(rates[:1] * len(self.sizes))):
            check_kinds(self.base.updated(run.values))


def check_extrapolation(times: float) -> None:
    """Raise a ConfigError for a forecast at too large a multiple of the largest run's compute."""
    if times > MAX_EXTRAPOLATION:
        raise ConfigError(
            f"the run to forecast has {times:.0f} times the compute of the study's largest, but forecasts "
            f"reach at most {MAX_EXTRAPOLATION} times; add larger sizes"
        )


def check_epochs(what: str, tokens: float, train_tokens: int | None) -> None:
    """Raise a ConfigError for a run that repeats the data too often."""
    if train_tokens is not None and (epochs := tokens / train_tokens) > MAX_EPOCHS:
        raise ConfigError(
            f"{what} reads {epochs:.1f} epochs of the data, but a law needs at most {MAX_EPOCHS}; use more "
            "data, or smaller sizes"
        )


def _before_decay(steps: int) -> int:
    return steps - round(_DECAY_FRACTION * steps)


def study_base(study: Study) -> Config:
    """Return the configuration of a study's runs, without the values of each."""
    loaded = study.base.load()
    if (init_from := loaded.model.init_from) is not None:
        raise ConfigError(
            f"init_from={init_from} in the base: {study.set_by_file['init_from']}; remove it"
        )
    decay = {"schedule": "wsd", "decay_fraction": _DECAY_FRACTION, "min_lr": 0.0}
    fields = {"spike_detection": False, **study.overrides, **decay}
    return loaded.updated(
        fields | {"run_name": study.study_name, "resume": "auto", "branch_from": None}
    )


def cost_lines(study: Study) -> Iterator[str]:
    """Format models, runs, tokens and time; may raise ConfigError."""
    base = one_worker_for_auto(study_base(study))
    plan = StudyPlan(study, base, expected_vocab_size(base))
    plan.check(read_data(base).split_tokens("train") if data_is_there(base) else None)
    rows = []
    for number, size in enumerate(plan.sizes, 1):
        steps = [plan.steps(size, length) for length in plan.lengths]
        tokens = [f"{amount(n * plan.batch_tokens)} ({n:,})" for n in steps]
        rows.append([str(number), *map(str, size.shape), amount(size.parameters), *tokens])
    shape = ["layers", "heads", "channels", "parameters"]
    yield from table(["size"], [*shape, *(f"×{n} tokens (steps)" for n in plan.lengths)], rows)
    rates = study.peak_lrs
    middle = rates[len(rates) // 2]
    stages = [
        [*plan.rate_runs(0, rates), *plan.rate_runs(1, rates)],
        plan.rate_runs(2, [middle] * 3),
        plan.ladder([middle] * len(plan.sizes)),
    ]
    runs = [run for stage in stages for run in stage]
    all_tokens = sum(run.own_steps for run in runs) * plan.batch_tokens
    flops = sum(6 * run.size.parameters * run.own_steps for run in runs) * plan.batch_tokens
    yield (
        f"runs: {' + '.join(str(len(stage)) for stage in stages)} (rates at two sizes, rates at the "
        f"third, trunks and cooldowns), {amount(all_tokens)} tokens, {flops:.2g} FLOPs"
    )
    times = study.target.compute / plan.largest_compute
    yield f"target: {study.target.compute:.3g} FLOPs, {times:.1f} times the largest run"
    configs = [base.updated({**run.size.fields, "max_steps": run.own_steps}) for run in runs]
    yield time_line(configs, study.max_concurrent_runs)
