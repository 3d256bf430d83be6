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
from dataclasses import replace
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
from raytrain_gpt.core.kv_cache import KVCache
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import Optimizer, update
from raytrain_gpt.core.registry import build_optimizer, count_model, new_model
from raytrain_gpt.core.state import HostSnapshot, load_model, load_optimizer
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.doctor.check import Check, Failed, Skipped, named_check
from raytrain_gpt.doctor.code_runs import compare_runs
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.evaluate.evaluation import Evaluation
from raytrain_gpt.tracking.configured import NamedTracker
from raytrain_gpt.tracking.run_files import TRACKERS_DIR
from raytrain_gpt.tracking.trackers import TrackedRun

VOCAB_SIZE, SEQ_LEN = 257, 16
SIZES = {"num_layers": 2, "num_heads": 2, "embd_size": 32, "seq_len": SEQ_LEN}
CALL_LIMIT_S = 5.0
"""Limit for one call of a tracker."""

Judge = Callable[[Kind, Config], str]


def conformance(config: Config, say: Callable[[str], None]) -> list[Check]:
    """Check every kind that the used code declares, and say a line for each check.

    Args:
        config: Its settings of kinds that it chooses are used.

    Raises:
        ConfigError: the code declares nothing.
        Interrupted: Ctrl+C or SIGTERM.
    """
    code, declared, checks = kinds.used_code(), [*kinds.own_kinds().values()], list[Check]()
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
            for name, judge in _JUDGES[kind.selector].items():
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
    values: dict[str, Any] = {**SIZES}
    for kind in chosen:
        section = getattr(given, SECTIONS[kind.selector])
        if (kind.selector, kind.name) in section.chosen_names():
            values |= section.settings(kind.settings).model_dump()
        values[kind.selector] = kind.name
    try:
        return Config().updated(values)
    except ConfigError as error:
        names = " ".join(f"--{kind.selector} {kind.name}" for kind in chosen)
        raise Failed(f"{error}; choose {names} with settings that fit {SIZES}") from None


def _model(config: Config, num_layers: int = 2, seed: int = 1, noise: float = 0.2) -> GPT:
    """Model in evaluation mode; an initialization alone often zeroes layers that would show a mistake."""
    model = new_model(replace(GPTShape.of(config, VOCAB_SIZE), num_layers=num_layers))
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    return model.eval()


def _weights(model: nn.Module) -> Tensor:
    """A copy of all parameters, (n,)."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _ids(rows: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(3))


def _take_steps(model: GPT, optimizer: Optimizer, steps: range, lr: float = 1e-3) -> list[float]:
    """Take steps on the same few tokens; returns the losses before them."""
    losses = []
    for step in steps:
        loss = model.train()(_ids(2).roll(step, 1), _ids(2).roll(step - 1, 1))
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise Failed(f"{name} has no gradient; use it in every step, or remove it")
        update(optimizer, [*model.parameters()], lr, 1.0)
    return losses


def _reloaded(model: GPT, optimizer: Optimizer, config: Config) -> tuple[GPT, Optimizer]:
    """A new model and optimizer with the state of these, by the files of a checkpoint."""
    new = _model(config)
    new_optimizer = build_optimizer(new, config.optim)
    snapshot = HostSnapshot(model, optimizer)
    snapshot.refresh()
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
        for file in snapshot.files():
            snapshot.write(file, Path(directory, file))
        load_model(Path(directory), new)
        load_optimizer(Path(directory), new, new_optimizer)
    return new, new_optimizer


def _check_close(a: Tensor, b: Tensor, problem: str) -> None:
    gap = float((a - b).abs().max())
    if not gap <= 1e-4 * max(1.0, float(b.abs().max())):
        raise Failed(f"{problem} (by up to {gap:.2g})")


# --- architectures


def _counts(kind: Kind, config: Config) -> str:
    shape, counts = GPTShape.of(config, VOCAB_SIZE), []
    for num_layers in (1, 2, 3):
        counts.append(sum(p.numel() for p in _model(config, num_layers).parameters()))
        counted = count_model(replace(shape, num_layers=num_layers)).num_parameters
        if counts[-1] != counted:
            raise Failed(
                f"{counts[-1]} parameters with {num_layers} layers, {counted} by counting; make layers by "
                "the shape alone"
            )
    return f"{', '.join(map(str, counts))} parameters with 1, 2 and 3 layers, as counted"


def _init(kind: Kind, config: Config) -> str:
    first, again, other = (_weights(_model(config, seed=seed, noise=0)) for seed in (1, 1, 2))
    if not first.isfinite().all():
        raise Failed("init_weights left values that are not finite; initialize every parameter")
    if not torch.equal(first, again):
        raise Failed("init_weights(1) gave other weights the second time; draw from its seed alone")
    if torch.equal(first, other):
        raise Failed("init_weights gave seeds 1 and 2 the same weights; draw from its seed")
    return "weights follow from the seed"


@torch.no_grad()
def _causality(kind: Kind, config: Config) -> str:
    model, ids = _model(config), _ids(2)
    logits = model.logits(ids)
    for length in (1, SEQ_LEN // 2, SEQ_LEN - 1):
        changed = ids.clone()
        changed[:, length:] = (changed[:, length:] + 1) % VOCAB_SIZE
        advice = f"token {length} changes logits before it; mask later tokens"
        _check_close(model.logits(changed)[:, :length], logits[:, :length], advice)
    return "no token changes logits before it"


@torch.no_grad()
def _rows(kind: Kind, config: Config) -> str:
    model, ids = _model(config).train(), _ids(4)
    alone = torch.cat([model.logits(row[None]) for row in ids])
    advice = "a row's logits depend on other rows; compute nothing over the batch"
    _check_close(model.logits(ids), alone, advice)
    return "4 rows together as each alone"


@torch.no_grad()
def _cache(kind: Kind, config: Config) -> str:
    model, ids, known = _model(config), _ids(2), SEQ_LEN - 4
    cache = KVCache(model.shape, len(ids), SEQ_LEN, model.device)
    attend = cache.prefill(0)
    parts = [model.hidden_with_cache(ids[:, :known], torch.arange(known), attend)]
    for at in range(known, SEQ_LEN):
        positions, attend = torch.full((2, 1), at), cache.decode([at] * 2)
        parts.append(model.hidden_with_cache(ids[:, at : at + 1], positions, attend))
    advice = "sampling token by token differs; use `attend` and `positions` as they are given"
    _check_close(torch.cat(parts, 1), model.hidden(ids), advice)
    return "token by token as all at once"


def _training(kind: Kind, config: Config) -> str:
    model = _model(config, noise=0)
    for name in model.state_dict().keys() - dict(model.named_parameters()).keys():
        raise Failed(f"no checkpoint has the buffer {name}; register it with persistent=False")
    optimizer = build_optimizer(model, config.optim)
    first, *_, last = _take_steps(model, optimizer, range(0, 20 * SEQ_LEN, SEQ_LEN), lr=1e-2)
    if not last < first:
        raise Failed(f"loss {first:.3f}, and {last:.3f} after 20 steps; check init_weights")
    loaded, _ = _reloaded(model, optimizer, config)
    with torch.no_grad():
        if not torch.equal(loaded.eval().logits(_ids(2)), model.eval().logits(_ids(2))):
            raise Failed("a loaded model differs; keep all that training changes in parameters")
    return f"loss {first:.3f} -> {last:.3f} in 20 steps; saved and loaded, it has the same logits"


@torch.no_grad()
def _compiles(kind: Kind, config: Config) -> str:
    explained = torch._dynamo.explain(_model(config).train())(_ids(2), _ids(2))
    torch._dynamo.reset()
    if explained.graph_break_count:
        why = explained.break_reasons[0]
        at = f"{why.user_stack[-1].filename.partition('#')[0]}, line {why.user_stack[-1].lineno}"
        raise Failed(
            f"{at}: {why.reason.splitlines()[0]}: remove the graph break, or compile is slow"
        )
    return "one graph, without breaks"


# --- optimizers


def _updates(kind: Kind, config: Config) -> str:
    model = _model(config)
    optimizer, before = build_optimizer(model, config.optim), _weights(model)
    _take_steps(model, optimizer, range(1), lr=0.0)
    if not torch.equal(_weights(model), before):
        raise Failed("a learning rate of 0 changes weights; multiply updates by group['lr']")
    _take_steps(model, optimizer, range(1))
    if torch.equal(after := _weights(model), before):
        raise Failed("a step changes no weight; change p in place by p.grad")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    update(optimizer, [*model.parameters()], 1e-3, 1.0)
    if not torch.equal(_weights(model), after):
        raise Failed("NaN gradients change weights; change them in step() alone")
    return "weights follow the learning rate, and NaN gradients are skipped"


def _state(kind: Kind, config: Config) -> str:
    straight, cut = _model(config), _model(config)
    _take_steps(straight, build_optimizer(straight, config.optim), range(4))
    optimizer = build_optimizer(cut, config.optim)
    _take_steps(cut, optimizer, range(2))
    resumed, optimizer = _reloaded(cut, optimizer, config)
    _take_steps(resumed, optimizer, range(2, 4))
    if not torch.equal(_weights(straight), _weights(resumed)):
        raise Failed(
            "4 steps differ from 2, saved and loaded, and 2 more; keep all that changes in self.state[p] or "
            "as numbers in param_groups, and draw nothing at random"
        )
    return "4 steps as 2, saved and loaded, and 2 more"


def _elementwise(kind: Kind, config: Config) -> str:
    if not kind.works_on_shards:
        raise Skipped("not declared elementwise, so not for parallel=fsdp")
    generator = torch.Generator().manual_seed(4)
    start, *gradients = torch.randn(4, 8, 6, generator=generator)

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


# --- schedules, evaluations, trackers


def _factors(kind: Kind, config: Config) -> str:
    settings, calls = config.optim.settings(kind.settings), []
    for max_steps in (1, 10, 1000):
        calls += [(step, max_steps) for step in range(max_steps + 1)]
    factors = {call: kind.call(*call, settings) for call in calls}
    for (step, max_steps), value in factors.items():
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            at = f"step {step} of {max_steps}"
            raise Failed(f"{value!r} at {at}; return a finite factor, 0 or more")
    for step, max_steps in random.Random(6).sample(calls, len(calls)):
        again, value = kind.call(step, max_steps, settings), factors[step, max_steps]
        if again != value:
            at = f"step {step} of {max_steps}"
            raise Failed(f"{value} and then {again} at {at}; compute it from the arguments")
    return f"{len(calls)} factors are finite and follow from the step"


def _sums(kind: Kind, config: Config) -> str:
    model, tokenizer = _model(config), load_tokenizer("bytes")
    before = _weights(model)

    def sums(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
        ranks = cast(Collectives, SimpleNamespace(rank=rank, world_size=world_size))
        run = Evaluation(config, model, tokenizer, None, ranks, contextlib.nullcontext, None)
        pairs, error = run.sums(kind)
        if error is not None:
            raise Failed(f"{error}; correct it")
        for name, pair in pairs.items():
            if not all(map(math.isfinite, pair)):
                raise Failed(f"{name} is {pair}; return a sum and a count, both finite")
        return pairs

    whole, *shares = sums(0, 1), sums(0, 2), sums(1, 2)
    if not whole.keys() == shares[0].keys() == shares[1].keys():
        raise Failed(f"ranks return {[[*share] for share in shares]}; return the same names on all")
    for name, pair in whole.items():
        added = tuple(map(sum, zip(*(share[name] for share in shares), strict=True)))
        close = functools.partial(math.isclose, rel_tol=1e-4, abs_tol=1e-6)
        if not all(map(close, pair, added)):
            raise Failed(
                f"{name} is {pair} on one rank, but ranks 0 and 1 of 2 add up to {added}; return sums and "
                "counts of examples rank, rank + world_size, …"
            )
    if sums(0, 1) != whole:
        raise Failed("the second call returned other sums; keep nothing between calls")
    if model.training or not torch.equal(before, _weights(model)):
        raise Failed("the model's weights or mode changed; leave it as it was")
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


_JUDGES: dict[kinds.Selector, dict[str, Judge]] = {
    "architecture": {
        "counts": _counts,
        "initialization": _init,
        "causality": _causality,
        "rows": _rows,
        "cache": _cache,
        "training": _training,
        "compile": _compiles,
    },
    "optimizer": {"updates": _updates, "state": _state, "shards": _elementwise},
    "schedule": {"factors": _factors},
    "evaluations": {"sums": _sums},
    "trackers": {"calls": _calls},
}
"""Selector -> checks of its kinds by name."""
