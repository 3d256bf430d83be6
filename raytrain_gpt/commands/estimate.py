"""`estimate`: what a run will take, before anybody pays for it."""

from __future__ import annotations

import json
from typing import Annotated

from raytrain_gpt.commands.flags import SECTIONS, ConfigOptions, JsonOptions, Metavar, command, say


class EstimateFlags(JsonOptions, ConfigOptions):
    """What is known of the run besides its configuration."""

    probe: bool = False
    """Time a few real steps on the cluster that train would use."""
    device: Annotated[str | None, Metavar("NAME")] = None
    """GPU to estimate for, such as H200 or A100-SXM4-80GB (default: the one of --probe)."""
    step_time_s: float | None = None
    """Time per step in seconds, if you have measured it (default: estimated)."""
    mfu: float | None = None
    """Assumed fraction of the device's peak without a measured time (default: 0.4)."""
    train_tokens: int | None = None
    """Tokens of the training data (default: those of data_path, if it exists)."""
    vocab_size: int | None = None
    """Vocabulary size of the tokenizer (default: that of data_path, else 50257)."""
    price_per_hour: float | None = None
    """Price of one on-demand device per hour (default: no price)."""
    spot_price_per_hour: float | None = None
    """Price of one spot device per hour (default: no price)."""


@command("estimate", EstimateFlags, SECTIONS)
def estimate(options: EstimateFlags) -> None:
    """Parameters, memory, time and price of a run, before it starts.

    Takes the flags of `train`. The speed comes from --probe, from --step_time_s, or from the peak of the
    device and an assumed MFU.
    """
    from raytrain_gpt.estimate.cost_model import Facts
    from raytrain_gpt.estimate.estimate import answer, lines

    known = options.model_dump(exclude={"as_json", "preset", "config", "device", "probe"})
    config, found = answer(options.resolved(), Facts(**known), say, options.device, options.probe)
    for line in lines(config, found):
        say(line)
    say(f"next: {options.train_command()}")
    if options.as_json:
        say(json.dumps(found.as_json()))
