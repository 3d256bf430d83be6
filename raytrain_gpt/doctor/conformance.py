"""Checks of the kinds in a user's file, without a cluster or data: `doctor --code FILE`.

1. Each kind is checked in this process on a tiny model, with its default settings, or the command's if the
   command chooses it.
2. If none fails, `code_runs` trains with one architecture, optimizer and schedule of the file at a time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config import kinds
from raytrain_gpt.config.kinds import DECIDES_WEIGHTS, SECTIONS, Kind
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.generate import KVCache
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import new_model
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.doctor.check import Check, Failed, Skipped, named_check
from raytrain_gpt.doctor.code_runs import compare_runs
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.evaluate.evaluation import Evaluation
from raytrain_gpt.tracking.configured import NamedTracker
from raytrain_gpt.tracking.run_files import TRACKERS_DIR
from raytrain_gpt.tracking.trackers import TrackedRun

_VOCAB_SIZE, _SEQ_LEN = 257, 16
_SIZES = {"num_layers": 2, "num_heads": 2, "embd_size": 32, "seq_len": _SEQ_LEN}
CALL_LIMIT_S = 5.0
"""Limit for one call of a tracker."""

_Judge = Callable[[Kind, Config], str]


def conformance(config: Config, say: Callable[[str], None]) -> list[Check]:
    """Check every kind that the used code declares, and say a line for each check.

    Args:
        config: Its settings of kinds that it chooses are used.

    Raises:
        ConfigError: the code declares nothing.
        Interrupted: Ctrl+C or SIGTERM.
    """
    code, declared, checks = kinds.used_code(), [*kinds.user_kinds().values()], list[Check]()
    assert code is not None, "the command was given code"
    if not declared:
        raise ConfigError(
            f"{code.file_name} declares nothing; use a decorator of raytrain_gpt.extend"
        )

    def add(name: str, judge: Callable[[Config], str], *chosen: Kind) -> None:
        def guarded() -> str:
            with code.errors_as_line(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return judge(_config_of(chosen, config))

        checks.append(named_check(name)(guarded)())
        say(checks[-1].line)

    with StopSignals("interrupted; nothing is left behind"):
        for kind in declared:
            if kind.selector in _JUDGES:
                name, judge = _JUDGES[kind.selector]
                add(f"{kind.selector} {kind.name}, {name}", functools.partial(judge, kind), kind)
        lists = ([kind for kind in declared if kind.selector == one] for one in DECIDES_WEIGHTS)
        for row in itertools.zip_longest(*lists):
            together = [kind for kind in row if kind is not None]
            name = f"runs of {', '.join(f'{kind.selector} {kind.name}' for kind in together)}"
            if any(check.status == "FAIL" for check in checks):
                checks.append(Check(name, "SKIP", "another check failed"))
                say(checks[-1].line)
            else:
                add(name, functools.partial(compare_runs, code), *together)
    return checks


def _config_of(chosen: Sequence[Kind], given: Config) -> Config:
    """A tiny configuration that chooses kinds, with settings of `given` for those that it chooses too."""
    values: dict[str, Any] = {**_SIZES}
    for kind in chosen:
        section = getattr(given, SECTIONS[kind.selector])
        if (kind.selector, kind.name) in section.chosen_names():
            values |= section.settings(kind.settings).model_dump()
        values[kind.selector] = kind.name
    try:
        return Config().updated(values)
    except ConfigError as error:
        names = " ".join(f"--{kind.selector} {kind.name}" for kind in chosen)
        raise Failed(f"{error}; choose {names} with settings that fit {_SIZES}") from None


def _model(config: Config) -> GPT:
    model = new_model(GPTShape.of(config, _VOCAB_SIZE))
    model.init_weights(1)
    return model


@torch.no_grad()
def _causality(kind: Kind, config: Config) -> str:
    """Compare all rows at once, as in training, with each alone and token by token, as in sampling."""
    model, generator = _model(config), torch.Generator().manual_seed(2)
    # Noise, since an initialization often zeroes layers that show a mistake.
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    ids = torch.randint(_VOCAB_SIZE, (4, _SEQ_LEN), generator=generator)
    together = model.train().hidden(ids)
    model.eval()
    for row, expected in zip(ids, together, strict=True):
        cache = KVCache(model.shape, 1, _SEQ_LEN, model.device)
        for at in range(_SEQ_LEN):
            attend = cache.decode(at) if at else cache.prefill(0)
            hidden = model.hidden_with_cache(row[None, at : at + 1], torch.full((1, 1), at), attend)
            gap = float((hidden[0, 0] - expected[at]).abs().max())
            if not gap <= 1e-4 * max(1.0, float(expected.abs().max())):
                raise Failed(
                    f"token {at} has other features in a batch than alone, token by token (by up to "
                    f"{gap:.2g}); mask later tokens, compute nothing over rows, use `attend` and `positions` "
                    "as given"
                )
    return "each token depends on those before it in its row alone"


def _elementwise(kind: Kind, config: Config) -> str:
    if not kind.works_on_shards:
        raise Skipped("not declared elementwise, so not for parallel=fsdp")
    start, *gradients = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(4))

    def trained(num_parts: int) -> Tensor:
        parts = [nn.Parameter(part.clone()) for part in start.chunk(num_parts)]
        optimizer = kind.call(parts, config.optim.settings(kind.settings), 1e-2)
        for gradient in gradients:
            for part, share in zip(parts, gradient.chunk(num_parts), strict=True):
                part.grad = share.clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    if not torch.equal(trained(1), trained(2)):
        raise Failed("halves of a matrix are updated unlike the whole; drop elementwise=True")
    return "halves of a matrix are updated like the whole"


def _factors(kind: Kind, config: Config) -> str:
    settings, calls = config.optim.settings(kind.settings), []
    for max_steps in (1, 10, 1000):
        calls += [(step, max_steps) for step in range(max_steps + 1)]
    factors = {call: kind.call(*call, settings) for call in calls}
    for step, max_steps in random.Random(6).sample(calls, len(calls)):
        value, again = factors[step, max_steps], kind.call(step, max_steps, settings)
        if not isinstance(value, int | float) or not 0 <= value < math.inf or again != value:
            raise Failed(
                f"{value!r} and then {again!r} at step {step} of {max_steps}; return a finite factor, 0 or "
                "more, from the arguments alone"
            )
    return f"{len(calls)} factors are finite and follow from the step"


def _sums(kind: Kind, config: Config) -> str:
    model, tokenizer = _model(config), load_tokenizer("bytes")

    def sums(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
        ranks = cast(Collectives, SimpleNamespace(rank=rank, world_size=world_size))
        run = Evaluation(config, model, tokenizer, None, ranks, contextlib.nullcontext, None)
        pairs, error = run.sums(kind)
        if error is not None:
            raise Failed(f"{error}; correct it")
        return pairs

    close = functools.partial(math.isclose, rel_tol=1e-4, abs_tol=1e-6)
    whole, first, second = sums(0, 1), sums(0, 2), sums(1, 2)
    ok = whole.keys() == first.keys() == second.keys() and not model.training
    for name in whole if ok else ():
        for total, *shares in zip(whole[name], first[name], second[name], strict=True):
            ok &= math.isfinite(total) and close(total, sum(shares))
    if not ok:
        raise Failed(
            f"{whole} on one rank, but {first} and {second} on ranks 0 and 1 of 2; return finite sums and "
            "counts of examples rank, rank + world_size, …, and leave the model as it was"
        )
    return f"{', '.join(whole) or 'nothing'}: the sums of one rank are those of two"


def _calls(kind: Kind, config: Config) -> str:
    """Call a tracker in two attempts of one run."""
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
        Path(directory, TRACKERS_DIR).mkdir()
        for step in (0, 1):
            run = TrackedRun(Path(directory), config, step, {})
            tracker = _in_time("__init__", NamedTracker, kind.name, run)
            rows = [
                {"step": step + 1, "train/loss": 5.5},
                {"step": step + 1, "event": "checkpoint"},
            ]
            _in_time("rows", tracker.rows, rows)
            _in_time("text", tracker.text, step + 1, "samples", "some text")
            _in_time("finish", tracker.finish, "finished", [])
    return "takes rows, a text and the end, and then those of a resumed run"


def _in_time(name: str, call: Callable[..., Any], *arguments: object) -> Any:
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([result], CALL_LIMIT_S).done:
        limit = f"{CALL_LIMIT_S:g} s"
        raise Failed(f"{name}() takes more than {limit}; later rows wait, so return at once")
    return result.result()


_JUDGES: dict[kinds.Selector, tuple[str, _Judge]] = {
    "architecture": ("causality", _causality),
    "optimizer": ("elementwise", _elementwise),
    "schedule": ("factors", _factors),
    "evaluations": ("sums", _sums),
    "trackers": ("calls", _calls),
}
"""Selector -> check of its kinds, with its name."""
