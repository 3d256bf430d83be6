"""The `estimate` command: gather or measure the facts, and print the estimate."""

from __future__ import annotations

from dataclasses import replace

import torch

from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.plan import Plan, micro_batch_change
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import AUTO_MEMORY_FIELDS, DEFAULT_DATA
from raytrain_gpt.core.device import (
    GPU_SPECS,
    GpuSpec,
    bf16_is_faster,
    gpu_spec,
    gpu_specs_matching,
)
from raytrain_gpt.data.locations import data_is_there, read_data
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.estimate.cost_model import Estimate, Facts, estimate
from raytrain_gpt.format import Log, amount, count, duration, size
from raytrain_gpt.trackers.configured import tracker_warnings
from raytrain_gpt.train import preflight
from raytrain_gpt.train.launch import training_session
from raytrain_gpt.train.memory_fit import fit_memory
from raytrain_gpt.train.probe import probe_run

_SPEED_SOURCES = {
    "probe": "measured by the probe",
    "given": "from the given step time",
    "table": "from the device's peak and an assumed MFU, not measured",
}


def estimate_run(
    config: Config,
    given: Facts,
    log: Log,
    device: str | None = None,
    probe: bool = False,
    device_memory_gb: float | None = None,
) -> tuple[Config, Estimate]:
    """Return the estimate and its configuration, fitted to the cluster if that was probed.

    Args:
        given: The user's facts, which override detected ones.
        device: GPU in the table, by a substring of its name; any name with `device_memory_gb`.
        device_memory_gb: Memory of a GPU. If it is not in the table, its speed is unknown.

    Raises:
        UserError: the configuration is impossible, or the device is not in the table.
    """
    if device_memory_gb is not None:
        like = gpu_specs_matching(device) if device else []
        spec = like[0] if len(like) == 1 else GpuSpec(device or "the GPU", 0.0, 0.0)
        gpu: GpuSpec | None = replace(spec, memory_bytes=device_memory_gb * 1e9)
    else:
        gpu = None if device is None else _device(device, log)
    vocab_size = given.vocab_size or preflight.expected_vocab_size(config)
    tokens_per_s, num_workers = None, config.cluster.num_workers
    if probe:
        plan, tokens_per_s, device_name = _probe_speed(config, log)
        config, num_workers = plan.config, plan.world_size
        gpu = gpu or gpu_spec(device_name)
    else:
        config = preflight.absolute_paths(config, log)
    train_tokens = given.train_tokens
    if data_is_there(config):
        data = read_data(config)  # epochs differ between the datasets of a mixture
        train_tokens = train_tokens or (None if data.is_mixed else data.split_tokens("train"))
    precision, use_gpu = config.train.precision, config.cluster.use_gpu
    # A probe resolves use_gpu, even on a device that is not in the table.
    on_gpu = use_gpu is True if probe else gpu is not None and use_gpu is not False
    native_bf16 = use_gpu is False and bf16_is_faster(torch.device("cpu"))
    if on_gpu:
        native_bf16 = gpu is None or gpu.has_bf16
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


def _probe_speed(config: Config, log: Log) -> tuple[Plan, float, str]:
    """Time steps of a short run of the configuration.

    Returns:
        The timed plan, tokens/s over all workers, and the name of rank 0's device.
    """
    with StopSignals("interrupted; nothing is left behind") as signals:
        config = preflight.prepare_default_data(config, log)
        with training_session(config, log) as (fitted, world_size, data):
            plan = fit_memory(fitted, world_size, data.vocab_size, log)
            log(f"timing steps on {count(world_size, 'worker')}")
            start, step_s = probe_run(plan.config, world_size, data, signals, log)
    fit = (start[name] for name in AUTO_MEMORY_FIELDS)  # smaller after a lack of memory
    plan = Plan.of(plan.config, world_size, *fit)
    return plan, fitted.train.global_batch_tokens / step_s, start["device"]


def _device(text: str, log: Log) -> GpuSpec:
    """Return the GPU with `text` in its name, the SXM one of several variants."""
    specs = gpu_specs_matching(text)
    sxm = [spec for spec in specs if spec.is_sxm]
    if len(specs) > 1 and len(sxm) == 1:
        others = ", ".join(spec.name.removeprefix("NVIDIA ") for spec in specs if not spec.is_sxm)
        log(f"device   {text} is {sxm[0].name}, the SXM variant; also in the table: {others}")
        return sxm[0]
    if len(specs) != 1:
        names = ", ".join(spec.name.removeprefix("NVIDIA ") for spec in specs or GPU_SPECS)
        problem = "is ambiguous" if specs else "is not in the table"
        raise ConfigError(
            f"device {text} {problem}; name one of: {names}; or set --device_memory_gb, or use --probe on it"
        )
    return specs[0]


def lines(config: Config, run: Estimate) -> list[str]:
    m, train, seq_len = config.model, config.train, config.data.seq_len
    num_checkpoints = train.keep_checkpoints + 2  # the best one, and one being written
    epochs = ""
    if run.steps_per_epoch == 0:
        epochs = ", less than one step per epoch"
    elif run.steps_per_epoch is not None:
        epochs = f", {count(run.steps_per_epoch, 'step', form=',')} per epoch"
        epochs += f", {run.max_steps / run.steps_per_epoch:.2f} epochs"
    out = [
        f"model    {amount(run.num_parameters)} parameters: {count(m.num_layers, 'layer')}, "
        f"{count(m.num_heads, 'head')}, "
        f"{m.embd_size} channels, context {seq_len}",
        f"batch    {train.global_batch_tokens:,} tokens per step = {count(run.num_workers, 'worker')} × "
        f"{count(run.micro_batches_per_step, 'micro-batch', 'micro-batches')} × "
        f"{run.micro_batch_sequences} × {seq_len}",
        f"work     {count(run.max_steps, 'step', form=',')}, {amount(run.total_tokens)} tokens{epochs}, "
        f"{run.flops_per_token / 1e6:,.1f} MFLOPs per token, {run.total_flops:.3g} FLOPs in total",
        _memory_line(run),
        f"disk     {size(run.checkpoint_bytes)} per checkpoint, up to "
        f"{size(run.checkpoint_bytes * num_checkpoints)} in total",
    ]
    if run.remedy is not None:
        out.append(f"to fit   {run.remedy}")
    return [*out, *_time_lines(run)]


def run_lines(config: Config, log: Log) -> list[str]:
    """Format parameters, batch, steps and workers of a run, its warnings, and whether its data exists.

    Needs no cluster.

    Raises:
        UserError: the configuration is impossible, or the data is damaged.
    """
    config_and_estimate = estimate_run(config, Facts(), log)
    change = micro_batch_change(config, config_and_estimate[1].num_workers)
    warnings = [*tracker_warnings(config), *([change] if change else [])]
    out = [*lines(*config_and_estimate)[:3], *(f"warning  {line}" for line in warnings)]
    if config.cluster.num_workers == "auto":
        out.append("workers  auto: one per GPU, or 1 without GPUs; the batch is shown for 1")
    if data_is_there(config):
        data = read_data(config)
        tokens = amount(data.split_tokens("train"))
        return [*out, f"data     {config.data.data_path}: {tokens} train tokens ({data.tokenizer})"]
    path = config.data.data_path
    advice = "train prepares it" if path == DEFAULT_DATA else "create it with raytrain-gpt prepare"
    return [*out, f"data     {path} does not exist; {advice}"]


def _memory_line(run: Estimate) -> str:
    memory, mode = run.memory, run.activation_checkpointing
    recomputed = "" if mode == "none" else f" with activation_checkpointing {mode}"
    line = (
        f"memory   {size(memory.total)} per device: weights {size(memory.weights)}, gradients "
        f"{size(memory.gradients)}, moments {size(memory.moments)}, activations "
        f"{size(memory.activations)}{recomputed}, logits {size(memory.logits)}"
    )
    if run.device is None:
        return line
    verdict = "fits" if run.fits else "DOES NOT FIT"
    return f"{line} | {verdict} {run.device.name} ({size(run.device.memory_bytes)})"


def _time_lines(run: Estimate) -> list[str]:
    if run.speed is None or run.train_s is None:
        known = run.device is not None and run.device.bf16_flops
        advice = "set --precision to bf16" if known else "name a --device of the table"
        return [f"time     unknown: {advice}, set --step_time_s, or measure with --probe"]
    speed = run.speed
    mfu = "" if speed.mfu is None else f", mfu {speed.mfu:.1%}"
    out = [
        f"speed    {speed.tokens_per_s:,.0f} tokens/s, {run.step_time_s:.3g} s per step{mfu} "
        f"({_SPEED_SOURCES[speed.source]})",
        f"time     {duration(run.train_s)} of steps ({run.train_s / 86400:.1f} days, "
        f"{run.device_hours:,.1f} device hours), without evaluations, checkpoints and restarts",
    ]
    prices = (("on demand", run.price), ("spot", run.spot_price))
    texts = ", ".join(f"{price:,.2f} {name}" for name, price in prices if price is not None)
    return [*out, f"price    {texts}"] if texts else out
