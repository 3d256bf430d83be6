"""An estimate from what was asked: the facts gathered, the lines that are printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.gpu_specs import DEVICES, Device, device_of, devices_called
from raytrain_gpt.data.locations import data_is_there, data_of
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.estimate.cost_model import ASSUMED_MFU, Estimate, Facts, estimate
from raytrain_gpt.format import amount, duration, size
from raytrain_gpt.train.preflight import absolute_paths

GPT2_VOCAB_SIZE = 50_257

Log = Callable[[str], None]


@dataclass(frozen=True)
class EstimateOptions:
    """What the command line says besides the configuration; None: nothing."""

    device: str | None
    probe: bool
    step_time_s: float | None
    mfu: float | None
    train_tokens: int | None
    vocab_size: int | None
    price_per_hour: float | None
    spot_price_per_hour: float | None


def answer(config: Config, asked: EstimateOptions, log: Log) -> tuple[Config, Estimate]:
    """The configuration as far as it was decided, and the estimate.

    Raises:
        UserError: the configuration cannot be, or the device is not known.
    """
    device = _device(asked.device)
    tokens_per_s, num_workers = None, config.cluster.num_workers
    if asked.probe:
        from raytrain_gpt.estimate.speed_probe import probe

        found = probe(config, log)
        config, num_workers = found.plan.config, found.plan.world_size
        tokens_per_s = found.forecast.tokens_per_s
        device = device or device_of(found.device_name)
    else:
        config = absolute_paths(config)
    vocab_size, train_tokens = asked.vocab_size, asked.train_tokens
    if data_is_there(config):
        data = data_of(config)
        vocab_size = data.vocab_size if vocab_size is None else vocab_size
        train_tokens = data.split_tokens("train") if train_tokens is None else train_tokens
    precision, uses_gpu = config.train.precision, config.cluster.use_gpu
    # The probe has decided use_gpu, on a device that the table may not have.
    on_gpu = uses_gpu is True if asked.probe else device is not None and uses_gpu is not False
    facts = Facts(
        vocab_size=GPT2_VOCAB_SIZE if vocab_size is None else vocab_size,
        num_workers=1 if num_workers == "auto" else num_workers,
        bf16=precision in ("bf16", "fp16") or (precision == "auto" and on_gpu),
        device=device,
        train_tokens=train_tokens,
        step_time_s=asked.step_time_s,
        tokens_per_s=tokens_per_s,
        mfu=ASSUMED_MFU if asked.mfu is None else asked.mfu,
        price_per_hour=asked.price_per_hour,
        spot_price_per_hour=asked.spot_price_per_hour,
    )
    return config, estimate(config, facts)


def _device(words: str | None) -> Device | None:
    if words is None:
        return None
    found = devices_called(words)
    if len(found) != 1:
        known = ", ".join(d.name.removeprefix("NVIDIA ") for d in found or DEVICES)
        what = "is not in the table" if not found else "may be several"
        raise ConfigError(f"device {words} {what}; name one of: {known}; or use --probe on it")
    return found[0]


def lines(config: Config, found: Estimate) -> list[str]:
    """The estimate for people."""
    m, train, seq_len = config.model, config.train, config.data.seq_len
    out = [
        f"model    {amount(found.num_parameters)} parameters: {m.num_layers} layers, {m.num_heads} heads, "
        f"{m.embd_size} channels, context {seq_len}",
        f"batch    {train.global_batch_tokens:,} tokens a step = {found.num_workers} workers × "
        f"{found.micro_batches_per_step} micro-batches × {found.micro_batch_sequences} × {seq_len}",
        f"work     {found.max_steps:,} steps, {amount(found.total_tokens)} tokens"
        + _epochs(found)
        + f", {found.flops_per_token / 1e6:,.1f} MFLOPs a token, {found.total_flops:.3g} FLOPs in all",
        _memory_line(found),
        f"disk     {size(found.checkpoint_bytes)} a checkpoint, up to "
        f"{size(found.checkpoint_bytes * (train.keep_checkpoints + 2))} of them",
    ]
    if found.largest and found.device is not None:
        fits = [
            f"{fit.model} {fit.sequences or '-'} ({fit.sequences_recomputing or '-'})"
            for fit in found.largest
        ]
        out.append(
            f"fits     {found.device.name}, largest micro_batch_sequences (with "
            f"activation_checkpointing full): {', '.join(fits)}"
        )
    return out + _time_lines(found)


def _epochs(found: Estimate) -> str:
    if found.steps_per_epoch is None:
        return ""
    if found.steps_per_epoch == 0:
        return ", an epoch has less than one step"
    epochs = found.max_steps / found.steps_per_epoch
    return f", {found.steps_per_epoch:,} steps an epoch, {epochs:.2f} epochs"


def _memory_line(found: Estimate) -> str:
    memory, mode = found.memory, found.activation_checkpointing
    recomputed = "" if mode == "none" else f" with activation_checkpointing {mode}"
    parts = (
        f"memory   {size(memory.total)} a device: weights {size(memory.weights)}, gradients "
        f"{size(memory.gradients)}, AdamW {size(memory.moments)}, activations "
        f"{size(memory.activations)}{recomputed}, logits {size(memory.logits)}"
    )
    if found.fits is None or found.device is None:
        return parts
    verdict = "fits" if found.fits else f"DOES NOT FIT; {_way_out(found)}"
    return f"{parts} | {verdict} {found.device.name} ({size(found.device.memory_bytes)})"


def _way_out(found: Estimate) -> str:
    if found.micro_batch_sequences > 1:
        return "lower micro_batch_sequences"
    if found.activation_checkpointing != "full":
        return "set activation_checkpointing to full"
    return "take a smaller model, or parallel fsdp with more num_workers"


def _time_lines(found: Estimate) -> list[str]:
    if found.speed is None or found.train_s is None or found.step_time_s is None:
        way = "name a --device" if found.device is None else "set --precision to bf16"
        return [f"time     not known: {way}, give --step_time_s, or measure with --probe"]
    speed = found.speed
    how = {
        "probe": "measured by the probe",
        "given": "from the step time given",
        "table": "from the device's peak and an assumed MFU, not measured",
    }[speed.source]
    mfu = "" if speed.mfu is None else f", mfu {speed.mfu:.1%}"
    out = [
        f"speed    {speed.tokens_per_s:,.0f} tokens/s, {found.step_time_s:.3g} s a step{mfu} ({how})",
        f"time     {duration(found.train_s)} of steps ({found.train_s / 86400:.1f} days, "
        f"{found.device_hours:,.1f} device hours), without evaluations, checkpoints and restarts",
    ]
    prices = (("on demand", found.price), ("spot", found.spot_price))
    told = [f"{price:,.2f} {name}" for name, price in prices if price is not None]
    return [*out, *([f"price    {', '.join(told)}"] if told else [])]
