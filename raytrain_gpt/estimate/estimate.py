"""The `estimate` command: facts are gathered or measured, and the estimate is printed as lines."""

from __future__ import annotations

from dataclasses import replace

import torch

from raytrain_gpt.cluster.compilers import check_compiler
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.batch import micro_batch_change
from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import (
    GPU_SPECS,
    GpuSpec,
    bf16_is_faster,
    gpu_spec,
    gpu_specs_matching,
)
from raytrain_gpt.data.locations import data_is_there, data_of
from raytrain_gpt.doctor.bench import forecast
from raytrain_gpt.doctor.rank_probe import ask_ranks
from raytrain_gpt.errors import ConfigError, TrainingFailed
from raytrain_gpt.estimate.cost_model import Estimate, Facts, estimate
from raytrain_gpt.format import Log, amount, count, duration, size
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.train import preflight
from raytrain_gpt.train.launch import DEFAULT_DATA, expected_vocab_size, training_session
from raytrain_gpt.train.memory_fit import fit_memory
from raytrain_gpt.train.memory_search import NO_REMEDY

SPEED_SOURCES = {
    "probe": "measured by the probe",
    "given": "from the step time given",
    "table": "from the device's peak and an assumed MFU, not measured",
}


def answer(
    config: Config, given: Facts, log: Log, device: str | None = None, probe: bool = False
) -> tuple[Config, Estimate]:
    """The configuration, fitted to the cluster if that was probed, and the estimate.

    Args:
        given: What the user says; it goes before what is found.
        device: Part of the name of a GPU in the table.

    Raises:
        UserError: the configuration is not possible, or the device is not in the table.
    """
    gpu = None if device is None else _device(device, log)
    vocab_size = given.vocab_size or expected_vocab_size(config)
    tokens_per_s, num_workers = None, config.cluster.num_workers
    if probe:
        plan, tokens_per_s, device_name = _probe_speed(config, log)
        config, num_workers = plan.config, plan.world_size
        gpu = gpu or gpu_spec(device_name)
    else:
        config = preflight.absolute_paths(config)
    train_tokens = given.train_tokens
    if train_tokens is None and data_is_there(config):
        train_tokens = data_of(config).split_tokens("train")
    precision, use_gpu = config.train.precision, config.cluster.use_gpu
    # A probe has decided use_gpu, on a device that need not be in the table.
    on_gpu = use_gpu is True if probe else gpu is not None and use_gpu is not False
    native_bf16 = on_gpu or (use_gpu is False and bf16_is_faster(torch.device("cpu")))
    facts = replace(
        given,
        vocab_size=vocab_size,
        num_workers=1 if num_workers == "auto" else max(1, num_workers),
        bf16=precision in ("bf16", "fp16") or (precision == "auto" and native_bf16),
        device=gpu,
        train_tokens=train_tokens,
        tokens_per_s=tokens_per_s,
    )
    return config, estimate(config, facts)


def _probe_speed(config: Config, log: Log) -> tuple[RunPlan, float, str]:
    """Time steps of a configuration's own loop on its own data; nothing trained is kept.

    Returns:
        The plan that was timed, tokens/s over all workers, and the name of rank 0's device.

    Raises:
        UserError: the configuration, data or cluster cannot be used.
        TrainingFailed: the steps did not finish, for example for lack of memory.
        Interrupted: Ctrl+C or SIGTERM.
    """
    stopped = StopSignals("interrupted; nothing is left behind")
    with stopped, training_session(config, log) as (fitted, world_size, data):
        plan = fit_memory(fitted, world_size, data.vocab_size, log)
        ingest = IngestSpec(fitted, data, world_size)
        preflight.check_data(ingest)
        if not fitted.cluster.use_gpu:  # the workers of GPUs look themselves
            check_compiler(fitted, on_gpu=False, where="a CPU")
        log(f"timing steps on {count(world_size, 'worker')}")
        group = ask_ranks(fitted, world_size, ingest, plan)
    if group.bench is None or group.devices is None:
        raise TrainingFailed(
            f"no step was timed: {group.error}; set micro_batch_sequences to auto if memory is short, or "
            "see: raytrain-gpt doctor"
        )
    tokens_per_s = forecast(fitted, data.vocab_size, group.bench).tokens_per_s
    return plan, tokens_per_s, group.devices[0].device


def _device(text: str, log: Log) -> GpuSpec:
    """Find the GPU of a name; among several variants it is the SXM one."""
    found = gpu_specs_matching(text)
    sxm = [spec for spec in found if spec.is_sxm]
    if len(found) > 1 and len(sxm) == 1:
        others = ", ".join(spec.name.removeprefix("NVIDIA ") for spec in found if not spec.is_sxm)
        log(f"device   {text} means the SXM variant, {sxm[0].name}; also in the table: {others}")
        return sxm[0]
    if len(found) != 1:
        known = ", ".join(spec.name.removeprefix("NVIDIA ") for spec in found or GPU_SPECS)
        what = "is not in the table" if not found else "may be several"
        raise ConfigError(f"device {text} {what}; name one of: {known}; or use --probe on it")
    return found[0]


def lines(config: Config, found: Estimate) -> list[str]:
    """The estimate for people."""
    m, train, seq_len = config.model, config.train, config.data.seq_len
    num_checkpoints = train.keep_checkpoints + 2  # the best one, and one that is being written
    epochs = ""
    if found.steps_per_epoch == 0:
        epochs = ", an epoch has less than one step"
    elif found.steps_per_epoch is not None:
        epochs = f", {count(found.steps_per_epoch, 'step', form=',')} an epoch"
        epochs += f", {found.max_steps / found.steps_per_epoch:.2f} epochs"
    out = [
        f"model    {amount(found.num_parameters)} parameters: {count(m.num_layers, 'layer')}, "
        f"{count(m.num_heads, 'head')}, "
        f"{m.embd_size} channels, context {seq_len}",
        f"batch    {train.global_batch_tokens:,} tokens a step = {count(found.num_workers, 'worker')} × "
        f"{count(found.micro_batches_per_step, 'micro-batch', 'micro-batches')} × "
        f"{found.micro_batch_sequences} × {seq_len}",
        f"work     {count(found.max_steps, 'step', form=',')}, {amount(found.total_tokens)} tokens{epochs}, "
        f"{found.flops_per_token / 1e6:,.1f} MFLOPs a token, {found.total_flops:.3g} FLOPs in all",
        _memory_line(found),
        f"disk     {size(found.checkpoint_bytes)} a checkpoint, up to "
        f"{size(found.checkpoint_bytes * num_checkpoints)} of them",
    ]
    if found.fits is False:
        out.append(f"to fit   {found.remedy.way_out if found.remedy else NO_REMEDY}")
    if found.device is not None:
        fits = ", ".join(
            f"{fit.model} {fit.sequences or '-'} ({fit.sequences_recomputing or '-'})"
            for fit in found.largest
        )
        out.append(
            f"fits     {found.device.name}, largest micro_batch_sequences (with "
            f"activation_checkpointing full): {fits}"
        )
    return out + _time_lines(found)


def run_lines(config: Config, log: Log) -> list[str]:
    """Parameters, batch, steps and workers of a run, its warnings, and whether its data exists.

    No cluster is asked.

    Raises:
        UserError: the configuration is not possible, or the data is damaged.
    """
    found = answer(config, Facts(), log)
    change = micro_batch_change(config, found[1].num_workers)
    warnings = [*preflight.warnings(config), *([change] if change else [])]
    out = [*lines(*found)[:3], *(f"warning  {line}" for line in warnings)]
    if config.cluster.num_workers == "auto":
        out.append("workers  auto: one for each GPU found, 1 without; the batch is shown for 1")
    if data_is_there(config):
        data = data_of(config)
        tokens = amount(data.split_tokens("train"))
        return [*out, f"data     {config.data.data_path}: {tokens} train tokens ({data.tokenizer})"]
    path = config.data.data_path
    way = "train prepares it" if path == DEFAULT_DATA else "make it with raytrain-gpt prepare"
    return [*out, f"data     {path} is not there; {way}"]


def _memory_line(found: Estimate) -> str:
    memory, mode = found.memory, found.activation_checkpointing
    recomputed = "" if mode == "none" else f" with activation_checkpointing {mode}"
    line = (
        f"memory   {size(memory.total)} a device: weights {size(memory.weights)}, gradients "
        f"{size(memory.gradients)}, moments {size(memory.moments)}, activations "
        f"{size(memory.activations)}{recomputed}, logits {size(memory.logits)}"
    )
    if found.device is None:
        return line
    verdict = "fits" if found.fits else "DOES NOT FIT"
    return f"{line} | {verdict} {found.device.name} ({size(found.device.memory_bytes)})"


def _time_lines(found: Estimate) -> list[str]:
    if found.speed is None or found.train_s is None:
        way = "name a --device" if found.device is None else "set --precision to bf16"
        return [f"time     not known: {way}, give --step_time_s, or measure with --probe"]
    speed = found.speed
    mfu = "" if speed.mfu is None else f", mfu {speed.mfu:.1%}"
    out = [
        f"speed    {speed.tokens_per_s:,.0f} tokens/s, {found.step_time_s:.3g} s a step{mfu} "
        f"({SPEED_SOURCES[speed.source]})",
        f"time     {duration(found.train_s)} of steps ({found.train_s / 86400:.1f} days, "
        f"{found.device_hours:,.1f} device hours), without evaluations, checkpoints and restarts",
    ]
    prices = (("on demand", found.price), ("spot", found.spot_price))
    told = ", ".join(f"{price:,.2f} {name}" for name, price in prices if price is not None)
    return [*out, f"price    {told}"] if told else out
