"""Console lines of steps and events."""

from __future__ import annotations

import pytest

from raytrain_gpt.columns import Row, event_line, step_line


def test_the_console_line_has_the_form_of_the_specification() -> None:
    row = {
        "step": 19074,
        "train/loss": 3.445,
        "optim/lr": 5.51e-4,
        "optim/grad_norm": 0.85,
        "perf/tokens_per_s": 55188.2,
        "perf/step_time_s": 9.5,
        "perf/mfu": 0.412,
        "data/epoch": 1,
    }
    assert step_line(row, 95365) == (
        "step 19074/95365 | epoch 1 | loss 3.4450 | lr 5.51e-04 | norm 0.85 | 9500 ms | "
        "55,188 tok/s | mfu 41.2% | eta 8d 9h"
    )


@pytest.mark.parametrize(
    ("loss_zscore", "name"),
    [(9.1, "spike"), (6.0, "spike"), (-0.4, "high gradient norm"), (None, "high gradient norm")],
)
def test_only_a_high_loss_is_called_a_spike(loss_zscore: float | None, name: str) -> None:
    row: Row = {"step": 15, "event": "spike", "loss": 9.0, "grad_norm": 2.0, "batch": 3}
    row |= {"loss_zscore": loss_zscore, "grad_norm_zscore": 12.0}
    line = event_line(row, 40, 6.0, "runs/a b")
    command = "raytrain-gpt data at 'runs/a b' --batch 3"
    assert line == f"step 15/40 | {name} | loss 9.0000 | norm 2.00 | {command}"
