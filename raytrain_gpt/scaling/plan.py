"""The runs of a study, as pure functions of its file.

Each size has a trunk, a straight run of the longest length, and a cooldown for each shorter length: a branch
from the trunk's checkpoint at which the rate of a straight run of that length starts to fall. So a cooldown
equals that straight run bit for bit, and four lengths cost 47 tokens per parameter instead of 75.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raytrain_gpt.config.schema import Config, check_kinds
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import amount, count
from raytrain_gpt.scaling.study_file import LEAST, SET_BY_STUDY, Study

_DECAY_FRACTION = 0.2
_WHOLE_DECAYS = 5
"""Lengths are multiples of this many steps, so that decays have an integer number of steps."""
_DEFAULT_NUM_SIZES, _LARGEST_SHARE = 5, 1 / 10
"""Sizes, and compute of the largest run as a fraction of the target's, if the file has none."""
_FAR_EXTRAPOLATION, MAX_EXTRAPOLATION = 15, 30
"""Compute of a forecast over the largest run's from which it is doubted, and refused."""
MAX_EPOCHS = 4
"""More repetitions of data are worth less than new tokens (Muennighoff et al., 2023)."""
_MAX_WARMUP = 1 / 10
_FEW_STEPS = 100
"""Steps of the shortest run below which it is doubted: one of 85 was 0.07 nats off the line of the others."""
_NUM_SEEDS = 3
_ASPECT_WEIGHT = 0.25
_MAX_LAYERS, _MAX_HEADS = 512, 4096


@dataclass(frozen=True)
class Size:
    """A model of the ladder.

    Attributes:
        parameters: FLOPs per token / 6, so that head and attention count.
        shape: Layers, heads, channels.
    """

    parameters: float
    shape: tuple[int, int, int]

    @property
    def fields(self) -> dict[str, int]:
        return dict(zip(("num_layers", "num_heads", "embd_size"), self.shape, strict=True))


def size_near(base: Config, vocab_size: int, parameters: float) -> Size:
    """Find the shape nearest to a size with the head size of `base` and about its width per layer.

    Raises:
        ConfigError: no shape has about this size.
    """
    model = base.model
    head_size, aspect = model.embd_size // model.num_heads, model.embd_size / model.num_layers

    def size(num_layers: int, num_heads: int) -> Size:
        size = Size(0, (num_layers, num_heads, num_heads * head_size))
        shape = GPTShape.of(base.updated(size.fields), vocab_size)
        return Size(count_model(shape).flops_per_token / 6, size.shape)

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


@dataclass(frozen=True)
class PlannedRun:
    """A run of the study.

    Attributes:
        values: Field -> value, besides the base's.
        trunk: Run that it branches from, or "".
        own_tokens: Those that it trains itself.
    """

    name: str
    size: Size
    tokens: int
    values: dict[str, Any]
    trunk: str
    own_tokens: int


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
            largest = math.sqrt(self.study.target_compute * _LARGEST_SHARE / 6 / longest)
            given = tuple(largest / 2**k for k in reversed(range(_DEFAULT_NUM_SIZES)))
        sizes = [self.size_near(parameters) for parameters in given]
        different, span = {size.shape for size in sizes}, sizes[-1].parameters / sizes[0].parameters
        number, ratio = LEAST["sizes"]
        if len(different) < max(number, len(sizes)) or span < ratio:
            shown = ", ".join(amount(size.parameters) for size in sizes)
            raise ConfigError(
                f"shapes near sizes have {shown} parameters: {len(different)} sizes, a factor of {span:.1f}, "
                f"but a law needs {number} and {ratio}; raise num_heads in overrides for finer ones"
            )
        return sizes

    @property
    def batch_tokens(self) -> int:
        return self.base.train.global_batch_tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.study.tokens_per_parameter

    @property
    def middle_length(self) -> int:
        """Length of the runs that compare rates and batches."""
        return self.lengths[len(self.lengths) // 2]

    def steps(self, size: Size, length: int) -> int:
        unit = self.lengths[0] * size.parameters / self.batch_tokens / _WHOLE_DECAYS
        return _WHOLE_DECAYS * max(1, round(unit)) * (length // self.lengths[0])

    @property
    def largest_compute(self) -> float:
        largest = self.sizes[-1]
        return 6 * largest.parameters * self.steps(largest, self.lengths[-1]) * self.batch_tokens

    def rate_runs(self, index: int, rates: Sequence[float]) -> list[PlannedRun]:
        """Return the runs of a size with different peak rates."""
        size = self.sizes[index]
        steps, name = self.steps(size, self.middle_length), f"rate-{index + 1}"
        return [self._run(f"{name}-{rate:g}", size, steps, peak_lr=rate) for rate in rates]

    def ladder(self, rates: Sequence[float]) -> list[PlannedRun]:
        """Return trunks, largest first, seeds, twice the batch, and cooldowns, smallest first.

        In this order, few have to wait for a trunk.

        Args:
            rates: Peak rate of each size.
        """
        trunks, cooldowns = [], []
        longest = self.lengths[-1]
        for number in range(len(self.sizes), 0, -1):
            size, rate = self.sizes[number - 1], rates[number - 1]
            steps, every = (
                self.steps(size, longest),
                _before_decay(self.steps(size, self.lengths[0])),
            )
            saved: dict[str, Any] = {
                "checkpoint_every_steps": every,
                "keep_checkpoints": -(-steps // every),
            }
            trunk = self._run(f"size-{number}-{longest}", size, steps, peak_lr=rate, **saved)
            trunks.append(trunk)
            for length in self.lengths[:-1]:
                steps, name = self.steps(size, length), f"size-{number}-{length}"
                cooldowns.append(self._run(name, size, steps, trunk=trunk.name, peak_lr=rate))
        size, seed = self.sizes[0], self.base.train.seed
        steps = self.steps(size, longest)
        seeds = [
            self._run(f"seed-{n}", size, steps, peak_lr=rates[0], seed=seed + n)
            for n in range(1, _NUM_SEEDS)
        ]
        # The rate grows with the square root of the batch, as gradients' noise falls (Malladi et al., 2022).
        twice: dict[str, Any] = {
            "global_batch_tokens": 2 * self.batch_tokens,
            "peak_lr": float(f"{rates[1] * math.sqrt(2):.3g}"),
        }
        steps = self.steps(self.sizes[1], self.middle_length) // 2
        batch = self._run("batch-2x", self.sizes[1], steps, **twice)
        return [*trunks, *seeds, batch, *reversed(cooldowns)]

    def larger_run(self, rate: float, size: Size) -> PlannedRun:
        """Return the run that validates a forecast."""
        return self._run("validation", size, self.steps(size, self.lengths[-1]), peak_lr=rate)

    def _run(
        self, name: str, size: Size, steps: int, *, trunk: str = "", **values: Any
    ) -> PlannedRun:
        start = _before_decay(steps) if trunk else 0
        # A crash loses at most a tenth.
        values = {"checkpoint_every_steps": -(-steps // 10), "keep_checkpoints": 2, **values}
        values |= {**size.fields, "max_steps": steps, "eval_every_steps": steps}
        if trunk:
            values["branch_from"] = f"{trunk}@{start}"
        batch = values.get("global_batch_tokens", self.batch_tokens)
        return PlannedRun(name, size, steps * batch, values, trunk, (steps - start) * batch)

    def check(self, train_tokens: int | None) -> Iterator[str]:
        """Check all runs; yield doubts.

        Args:
            train_tokens: Tokens of the data, or None if it does not exist yet.

        Raises:
            ConfigError: a run is impossible, or the study would mean nothing.
        """
        shortest, longest = (
            self.steps(size, length)
            for size, length in zip(
                (self.sizes[0], self.sizes[-1]), (self.lengths[0], self.lengths[-1]), strict=True
            )
        )
        if (warmup := self.base.optim.warmup_steps) > _MAX_WARMUP * shortest:
            raise ConfigError(
                f"warmup_steps={warmup} is above a tenth of the shortest run, {count(shortest, 'step')}; set "
                f"it to {int(_MAX_WARMUP * shortest)} or less in overrides, or lower global_batch_tokens"
            )
        epochs = 0.0 if train_tokens is None else longest * self.batch_tokens / train_tokens
        if epochs > MAX_EPOCHS:
            raise ConfigError(
                f"the longest run reads {epochs:.1f} epochs of the data, but a law needs at most "
                f"{MAX_EPOCHS}; use more data, or smaller sizes"
            )
        if shortest < _FEW_STEPS:
            yield (
                f"the shortest run has {count(shortest, 'step')}, too few to be on the line of longer ones; "
                "lower global_batch_tokens, or leave out the smallest size"
            )
        yield from doubt_of_extrapolation(self.study.target_compute / self.largest_compute)
        rates = self.study.peak_lrs
        for run in (*self.rate_runs(0, rates), *self.ladder(rates[:1] * len(self.sizes))):
            check_kinds(self.base.updated(run.values))


def doubt_of_extrapolation(times: float) -> Iterator[str]:
    """Yield a doubt about a forecast for this multiple of the largest run's compute.

    Raises:
        ConfigError: it is above MAX_EXTRAPOLATION.
    """
    text = f"the run to forecast has {times:.0f} times the compute of the study's largest"
    if times > MAX_EXTRAPOLATION:
        raise ConfigError(
            f"{text}, and forecasts reach {MAX_EXTRAPOLATION} times; add larger sizes"
        )
    if times > _FAR_EXTRAPOLATION:
        yield f"{text}; 10 times is safer"


def _before_decay(steps: int) -> int:
    return steps - round(_DECAY_FRACTION * steps)


def study_base(study: Study) -> Config:
    """Return the configuration of a study's runs, without the values of each."""
    loaded = study.base.load()
    if (init_from := loaded.model.init_from) is not None:
        raise ConfigError(
            f"init_from={init_from} in the base: {SET_BY_STUDY['init_from']}; remove it"
        )
    decay = {"schedule": "wsd", "decay_fraction": _DECAY_FRACTION, "min_lr": 0.0}
    fields = {"spike_detection": False, **study.overrides, **decay}
    return loaded.updated(
        fields | {"run_name": study.study_name, "resume": "auto", "branch_from": None}
    )
