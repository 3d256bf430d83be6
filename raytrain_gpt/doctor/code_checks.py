"""Checks of the kinds in a user's file, without a cluster or data: `doctor --code FILE`.

1. Each kind is checked in this process on a tiny model, with its default settings, or the command's if the
   command chooses it.
2. If none fails, one architecture, optimizer and schedule of the file at a time train in other processes:
   resumed from a checkpoint, and on two ranks, they must end with the weights of an unbroken run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import DECIDES_WEIGHTS, SECTIONS, Kind, Selector
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.generate import KVCache
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import new_model
from raytrain_gpt.core.state import MODEL_FILE
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.doctor.check import Check, Failed, Skipped, checked
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.evaluate.evaluation import Evaluation
from raytrain_gpt.export.hf_weights import (
    HF_CONFIG_FILE,
    HF_WEIGHTS_FILE,
    hf_config_files,
    hf_tensors,
)
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.configured import NamedTracker
from raytrain_gpt.trackers.run_files import TRACKERS_DIR
from raytrain_gpt.trackers.tracked_run import TrackedRun

_VOCAB_SIZE, _SEQ_LEN = 257, 16
_SIZES = {"num_layers": 2, "num_heads": 2, "embd_size": 32, "seq_len": _SEQ_LEN}
_NUM_STEPS = 20
_RUN_LIMIT_S = 300.0
_KILLED, _ON_TWO_RANKS = "resumed from step 5", "on two ranks"
_FIELDS = {
    "max_steps": _NUM_STEPS, "checkpoint_every_steps": 5, "eval_every_steps": _NUM_STEPS, "eval_tokens": 256,
    "num_samples": 0, "global_batch_tokens": 256, "micro_batch_sequences": 4, "warmup_steps": 1,
    "precision": "fp32", "exact": True, "num_workers": 0, "cpus_per_worker": 1, "use_gpu": False,
    "tensorboard": False, "mlflow_uri": None,
}  # fmt: skip

_Judge = Callable[[Kind, Config], str]


def check_code(config: Config, say: Callable[[str], None]) -> list[Check]:
    """Check every kind that the configuration's code declares, and say a line for each check.

    Args:
        config: Its settings of kinds that it chooses are used.

    Raises:
        ConfigError: the code declares nothing.
        Interrupted: Ctrl+C or SIGTERM.
    """
    code, declared, checks = config.code, [*config.registry.user_kinds().values()], list[Check]()
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

        checks.append(checked(name, guarded))
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
    """Return a tiny configuration that chooses kinds, with settings of `given` for those it also chooses."""
    values: dict[str, Any] = {**_SIZES}
    for kind in chosen:
        section = getattr(given, SECTIONS[kind.selector])
        if (kind.selector, kind.name) in section.chosen_names():
            values |= section.settings(kind.settings).model_dump()
        values[kind.selector] = kind.name
    return parse_config({}, "defaults", given.registry).updated(values)


def _model(config: Config) -> GPT:
    model = new_model(GPTShape.of(config, _VOCAB_SIZE))
    model.init_weights(1)
    return model


def _noisy_model(config: Config) -> tuple[GPT, Tensor]:
    """Return a noisy model, because initialization often zeroes layers that hide a mistake, and ids."""
    model, generator = _model(config), torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model, torch.randint(_VOCAB_SIZE, (4, _SEQ_LEN), generator=generator)


@torch.no_grad()
def _causality(kind: Kind, config: Config) -> str:
    """Compare all rows at once, as in training, with each alone and token by token, as in sampling."""
    model, ids = _noisy_model(config)
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
                    f"token {at}'s features in a batch differ by up to {gap:.2g} from those computed alone, "
                    "token by token; mask later tokens, separate rows, use `attend` and `positions` as given"
                )
    return "each token depends only on its row, up to itself"


@torch.no_grad()
def _exported(kind: Kind, config: Config) -> str:
    """Compare the logits of transformers, from the files of an export, with the model's."""
    if not hasattr(kind.resolve(), "to_hf"):
        raise Skipped("it has no to_hf, so it cannot be exported")
    model, ids = _noisy_model(config)
    files, tensors = hf_config_files(model.shape, 0, "float32"), hf_tensors(model, torch.float32)
    if find_spec("transformers") is None:
        raise Skipped(
            "transformers is not installed, so no logits are compared; pip install transformers"
        )
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    if (model_type := json.loads(files[HF_CONFIG_FILE]).get("model_type")) not in CONFIG_MAPPING:
        raise Skipped(f"the installed transformers has no model_type {model_type} to compare with")
    disable_progress_bar()
    set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
        save_file(tensors, Path(directory, HF_WEIGHTS_FILE), metadata={"format": "pt"})
        for name, text in files.items():
            Path(directory, name).write_text(text)
        theirs, loaded = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    if odd := [*loaded["missing_keys"], *loaded["unexpected_keys"]]:
        raise Failed(
            f"transformers' {type(theirs).__name__} has other tensors, such as {odd[0]}; correct to_hf"
        )
    ours = model.eval().logits(ids)[..., :_VOCAB_SIZE]
    gap = float((theirs.eval()(ids).logits - ours).abs().max())
    if not gap <= 1e-3 * max(1.0, float(ours.abs().max())):
        raise Failed(
            f"the logits of transformers' {type(theirs).__name__} differ by up to {gap:.2g}; correct to_hf "
            "or config_of"
        )
    return f"transformers' {type(theirs).__name__} gives the same logits"


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
        raise Failed("halves of a matrix are not updated like the whole; remove elementwise=True")
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
                f"it returned {value!r}, then {again!r} at step {step} of {max_steps}; return a finite "
                "factor of 0 or more that depends only on the arguments"
            )
    return f"{len(calls)} factors are finite and follow from the step"


def _sums(kind: Kind, config: Config) -> str:
    model, tokenizer = _model(config), load_tokenizer("bytes")

    def sums(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
        ranks = cast(Collectives, SimpleNamespace(rank=rank, world_size=world_size))
        run = Evaluation(config, model, tokenizer, None, ranks, contextlib.nullcontext)
        pairs, error = run.sums(kind)
        if error is not None:
            raise Failed(f"{error}; return finite (sum, count) pairs")
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
            "counts of examples rank, rank + world_size, …, and leave the model unchanged"
        )
    return f"{', '.join(whole) or 'nothing'}: the same sums on one rank and on two"


def _calls(kind: Kind, config: Config) -> str:
    """Call a tracker in two attempts of one run."""
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
        Path(directory, TRACKERS_DIR).mkdir()
        for step in (0, 1):
            run = TrackedRun(Path(directory), config, step, {})
            tracker = NamedTracker(kind.name, run)
            row = {"step": step + 1}
            tracker.rows([{**row, "train/loss": 5.5}, {**row, "event": "checkpoint"}])
            tracker.text(step + 1, "samples", "some text")
            tracker.finish("finished", [])
    return "it takes rows, a text and the end, then those of a resumed run"


_JUDGES: dict[Selector, dict[str, _Judge]] = {
    "architecture": {"causality": _causality, "export": _exported},
    "optimizer": {"elementwise": _elementwise},
    "schedule": {"factors": _factors},
    "evaluations": {"sums": _sums},
    "trackers": {"calls": _calls},
}
"""Selector -> checks of its kinds by name."""


def compare_runs(code: Code, config: Config) -> str:
    """Compare a run with one that resumed from its first checkpoint, and with one on two ranks."""
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
        file, source, data = (Path(directory, name) for name in (code.file_name, "text", "data"))
        file.write_bytes(code.text.encode())
        source.write_text(" ".join(random.Random(5).choices(("one", "two", "three"), k=20_000)))
        prepare([str(source)], data, "bytes", PrepareOptions(), log=lambda _: None, in_process=True)
        own = config.updated({**_FIELDS, "data_path": str(data), "storage_path": directory})
        one, two = (own.updated({"run_name": name}) for name in ("one", "two"))
        expected = _trained(one, file)
        for checkpoint in Catalog(Location.of(directory) / "one").complete()[1:]:
            checkpoint.path.remove()  # like a kill after step 5
        for run, num_ranks, what in ((one, 1, _KILLED), (two, 2, _ON_TWO_RANKS)):
            if _trained(run, file, num_ranks) != expected:
                raise Failed(
                    f"{what}, the weights differ; use no randomness, and keep all state in the "
                    "optimizer's state[p] or as numbers in param_groups"
                )
    return f"{_NUM_STEPS} steps {_KILLED} and {_ON_TWO_RANKS} give the weights of an unbroken run"


def _trained(config: Config, file: Path, num_ranks: int = 1) -> bytes:
    """Train in other processes, and return the weights at the end."""
    run = Path(config.run.storage_path, config.run.run_name)
    settings, said = run.with_suffix(".yaml"), run.with_suffix(".txt")
    settings.write_text(config.to_yaml())
    words = [sys.executable, "-m"]
    if num_ranks > 1:
        words += ["torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", "-m"]
    words += ["raytrain_gpt.cli", "train", "--config", str(settings), "--code", str(file)]
    environment = {**os.environ, "RAY_ADDRESS": "local"}  # without workers, a cluster's is refused
    with (
        said.open("wb") as output,
        subprocess.Popen(words, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_RUN_LIMIT_S)
        finally:
            process.terminate()
    weights = run / "checkpoints" / f"step={_NUM_STEPS:08d}" / MODEL_FILE
    if not weights.exists():
        *_, error = ["no output", *said.read_text(errors="replace").splitlines()]
        raise Failed(f"a run did not finish: {error}; try it with train --num_workers 0")
    return weights.read_bytes()
