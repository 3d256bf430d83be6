"""A rate that falls with the inverse square root of the step (Vaswani et al., 2017).

raytrain-gpt train --code inverse_sqrt.py --schedule inverse_sqrt --warmup_steps 100
"""

from raytrain_gpt.extend import Field, Settings, schedule


class InverseSqrtSettings(Settings):
    inverse_sqrt_steps: int = Field(100, ge=1)
    """Steps at peak_lr before the rate falls, counted from the start."""


@schedule("inverse_sqrt", InverseSqrtSettings)
def inverse_sqrt(step, max_steps, settings):
    return (settings.inverse_sqrt_steps / max(settings.inverse_sqrt_steps, step)) ** 0.5
