"""Choice and content of a sweep's plots."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
from matplotlib.cbook import is_math_text
from matplotlib.text import Text

from raytrain_gpt.sweep import drawing
from raytrain_gpt.sweep.history import State, Trial
from raytrain_gpt.sweep.plots import (
    MAX_NAMED_CURVES,
    curves_figure,
    heat_map_figure,
    loss_figure,
    sweep_plots,
    upper_limit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

BUDGET = 1_000_000
LRS, BATCHES = (3e-4, 1e-3, 3e-3), (4096, 16384)
SPACE = ["peak_lr", "global_batch_tokens"]
LOSS, CURVES, HEAT_MAP = "loss_by_lr.png", "curves.png", "heat_map.png"


def trial(
    number: int,
    values: dict[str, Any],
    end: float | None = 3.0,
    tokens: int = BUDGET,
    state: State | None = None,
) -> Trial:
    """Make a trial with an evaluation every tenth of the budget and an initial loss of 6."""
    places = range(BUDGET // 10, tokens + 1, BUDGET // 10)
    curve = [(at, 3 + 3 * math.exp(-5 * at / BUDGET)) for at in places]
    if end is not None and curve:
        curve[-1] = (tokens, end)
    state = state or ("finished" if tokens == BUDGET else "stopped")
    objective = curve[-1][1] if curve else None
    return Trial(
        f"{number:03}", state, values, objective, tokens, 1.0, 1.0, "runs/x", None, tuple(curve)
    )


def grid(**changes: tuple[float | None, int, State | None]) -> list[Trial]:
    """Make 3 rates x 2 batches, each trial 0.1 nats worse; `t004=(end, tokens, state)` changes one."""
    found = []
    for i, (lr, batch) in enumerate(itertools.product(LRS, BATCHES)):
        end, tokens, state = changes.get(f"t{i:03}", (3 + 0.1 * i, BUDGET, None))
        found.append(trial(i, {"peak_lr": lr, "global_batch_tokens": batch}, end, tokens, state))
    return found


def lines(axes: Axes, gid: str) -> list[Line2D]:
    return [line for line in axes.lines if (line.get_gid() or "").split()[:1] == [gid]]


def legend(figure: Figure) -> list[str]:
    """Return the text lines of a figure's legend."""
    return [line for text in figure.legends[0].get_texts() for line in text.get_text().split("\n")]


def edge_names(axes: Axes) -> list[str]:
    """Return the texts above the upper edge of a plot, from left to right."""
    return [text.get_text() for text in axes.texts if text.get_gid() == "edge name"]


def loss(trials: list[Trial], space: list[str] = SPACE) -> Figure:
    return loss_figure(trials, space, "val/loss", BUDGET)


def curves(trials: list[Trial], space: list[str] = SPACE) -> Figure:
    return curves_figure(trials, space, "val/loss", BUDGET)


def heat_axes(trials: list[Trial], space: list[str] = SPACE) -> Axes:
    return heat_map_figure(trials, space, "val/loss", BUDGET).axes[0]


def test_a_grid_gets_all_three_pictures_as_png() -> None:
    pictures = sweep_plots(grid(), SPACE, "val/loss", BUDGET)
    assert set(pictures) == {LOSS, CURVES, HEAT_MAP}
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())


def pictures_of(trials: list[Trial], space: list[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of a sweep's plots, without rendering them."""
    monkeypatch.setattr(drawing, "png", lambda figure: b"")
    return set(sweep_plots(trials, space, "val/loss", BUDGET))


def test_a_heat_map_needs_two_fields_whose_values_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = [trial(i, {"peak_lr": lr}) for i, lr in enumerate(LRS)]
    assert pictures_of(rates, ["peak_lr"], monkeypatch) == {LOSS, CURVES}
    drawn = [
        trial(i, {"peak_lr": 1e-3 * 1.1**i, "global_batch_tokens": BATCHES[i % 2]})
        for i in range(6)
    ]
    assert pictures_of(drawn, SPACE, monkeypatch) == {LOSS, CURVES}


def test_there_is_nothing_to_draw_before_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [Trial("000"), trial(1, {"peak_lr": 1e-3}, tokens=0, state="running")]
    assert pictures_of(waiting, ["peak_lr"], monkeypatch) == set()
    one = trial(1, {"peak_lr": 1e-3}, tokens=BUDGET // 10, state="running")
    assert pictures_of([waiting[0], one], ["peak_lr"], monkeypatch) == {LOSS, CURVES}


def test_each_batch_has_a_line_known_without_its_colour() -> None:
    figure = loss(grid())
    series = lines(figure.axes[0], "series")
    assert [list(line.get_xdata()) for line in series] == [list(LRS)] * 2
    assert [float(y) for y in series[0].get_ydata()] == pytest.approx([3.0, 3.2, 3.4])
    assert len({line.get_linestyle() for line in series}) == 2
    assert len({point.get_marker() for point in lines(figure.axes[0], "point")}) == 2
    assert {"global_batch_tokens 4,096", "global_batch_tokens 16,384"} <= set(legend(figure))
    assert figure.axes[0].get_xscale() == "log"


def test_axes_have_names_and_units() -> None:
    axes = loss(grid()).axes[0]
    assert axes.get_ylabel() == "validation loss at 1M tokens (nats per token)"
    assert axes.get_xlabel() == "peak_lr\n(learning rate after warm-up)"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["3e-4", "1e-3", "3e-3"]
    bits = loss_figure(grid(), SPACE, "val/bits_per_byte", BUDGET).axes[0]
    assert bits.get_ylabel().endswith("(bits per byte)")
    axes = curves(grid()).axes[0]
    assert axes.get_xlabel() == "tokens seen"
    assert "1M" in [label.get_text() for label in axes.get_xticklabels()]


def test_the_best_is_ringed_and_named() -> None:
    figure = loss(grid(t004=(2.5, BUDGET, None), t005=(2.0, BUDGET // 2, None)))
    ring = lines(figure.axes[0], "best")
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ring] == [(3e-3, 2.5)]
    assert "best: 004, 2.5000" in legend(figure)


def test_a_stopped_trial_is_hollow_and_on_no_line() -> None:
    from matplotlib.colors import to_hex  # here: it takes seconds

    figure = loss(grid(t002=(3.1, BUDGET // 2, None)))
    points = lines(figure.axes[0], "point")
    hollow = [p for p in points if to_hex(p.get_markerfacecolor()) == "#ffffff"]
    assert [(p.get_xdata()[0], p.get_ydata()[0]) for p in hollow] == [(1e-3, 3.1)]
    assert "hollow: fewer than 1M tokens" in legend(figure)
    assert list(lines(figure.axes[0], "series")[0].get_xdata()) == [3e-4, 3e-3]


def test_what_is_far_off_stands_named_at_the_edge_and_flattens_nothing() -> None:
    trials = [
        *grid(
            t001=(80.0, BUDGET, None),
            t002=(math.nan, BUDGET // 2, None),
            t003=(4.0, BUDGET // 2, "failed"),
            t005=(5.5, BUDGET // 5, None),
        ),
        *(trial(6 + i, {"peak_lr": 1e-4, "global_batch_tokens": 4096}, 3.5) for i in range(3)),
    ]
    figure = loss(trials)
    axes = figure.axes[0]
    assert {
        "001 at 3e-4: 80.0000",
        "002 at 1e-3: not finite",
        "003 at 1e-3: failed",
        "005 at 3e-3: 5.5000, stopped at 20%",
    } <= set(legend(figure))
    assert [float(mark.get_ydata()[0]) for mark in lines(axes, "edge")] == [1] * 4
    assert edge_names(axes) == ["001", "002\n003", "005"]
    assert axes.get_ylim()[1] < 4.5
    assert len(lines(axes, "point")) == 5
    figure = curves(trials)
    assert {"001: 3e-4, 16,384", "80.0000", "not finite"} <= set(legend(figure))
    assert len(lines(figure.axes[0], "edge")) == 3
    assert edge_names(figure.axes[0]) == ["005", "002", "001"]
    assert figure.axes[0].get_ylim()[1] < 9


def test_nothing_is_cut_off_with_few_finished_trials() -> None:
    ends = (3.3579, 3.3555, 4.5003)
    trials = [trial(i, {"peak_lr": LRS[i]}, end) for i, end in enumerate(ends)]
    trials += [trial(3, {"peak_lr": 1e-4}, 5.5, BUDGET // 5), trial(4, {"peak_lr": 2e-4}, 80.0)]
    axes = loss(trials, ["peak_lr"]).axes[0]
    shown = [float(point.get_ydata()[0]) for point in lines(axes, "point")]
    assert (shown, edge_names(axes)) == ([*ends, 5.5, 80.0], [])
    assert axes.get_ylim()[0] < 3.3555
    assert axes.get_ylim()[1] > 80
    axes = curves(trials, ["peak_lr"]).axes[0]
    assert (len(lines(axes, "end")), lines(axes, "edge")) == (5, [])
    assert axes.get_ylim()[1] > 80


def test_the_scale_does_not_magnify_noise() -> None:
    trials = [trial(i, {"peak_lr": 1e-3 * 1.1**i}, 3.355 + 1e-4 * i) for i in range(7)]
    trials.append(trial(7, {"peak_lr": 2e-4}, 5.5, BUDGET // 5))
    low, high = loss(trials, ["peak_lr"]).axes[0].get_ylim()
    assert 0.06 < high - low < 0.2
    cells = grid(**{f"t{i:03}": (3.355 + 1e-4 * i, BUDGET, None) for i in range(6)})
    mesh = heat_axes(cells).collections[0]
    assert mesh.norm.vmax - mesh.norm.vmin == pytest.approx(0.0671)


def test_of_many_trials_at_the_edge_only_some_are_listed() -> None:
    full = [trial(50 + i, {"peak_lr": 1e-3 * (1 + i)}, 3 + i / 10) for i in range(6)]
    lost = [trial(i, {"peak_lr": 2e-4 * 1.05**i}, 80.0, BUDGET // 10) for i in range(45)]
    figure = loss(full + lost, ["peak_lr"])
    assert legend(figure)[-1] == "and 33 more"
    names = edge_names(figure.axes[0])
    assert names[0].startswith("000\n001\n002\n+")
    assert sum(3 + int(name.partition("+")[2] or 0) for name in names) == len(lost)


def test_a_pale_curve_that_is_above_the_scale_is_named_at_the_edge() -> None:
    trials = [trial(i, {"peak_lr": 1e-3 * 1.1**i}, 3 + 0.01 * i) for i in range(MAX_NAMED_CURVES)]
    axes = curves([*trials, trial(20, {"peak_lr": 1e-2}, 80.0)], ["peak_lr"]).axes[0]
    assert (len(lines(axes, "edge")), edge_names(axes)) == (1, ["020"])


def test_marks_at_the_edge_stand_within_the_picture_though_no_point_has_their_rate() -> None:
    axes = loss(grid(t000=(None, 0, "failed"), t001=(None, 0, "failed"))).axes[0]
    assert {float(mark.get_xdata()[0]) for mark in lines(axes, "edge")} == {LRS[0]}
    assert axes.get_xlim()[0] < LRS[0]


def test_without_a_rate_the_first_number_is_the_axis_else_names_side_by_side() -> None:
    values = [{"schedule": s, "weight_decay": w} for s in ("wsd", "cosine") for w in (0.0, 0.1)]
    trials = [trial(i, v) for i, v in enumerate(values)]
    figure = loss(trials, ["schedule", "weight_decay"])
    assert figure.axes[0].get_xlabel().startswith("weight_decay")
    assert figure.axes[0].get_xscale() == "linear"
    assert {"schedule wsd", "schedule cosine"} <= set(legend(figure))
    axes = loss(trials[::2], ["schedule"]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["wsd", "cosine"]


def test_points_are_not_joined_where_another_field_varies_freely() -> None:
    rates = [1e-3, 1.3e-3, 2.1e-3, 4.7e-3]
    trials = [trial(i, {"peak_lr": r, "dropout": 0.013 * i}) for i, r in enumerate(rates)]
    assert lines(loss(trials, ["peak_lr", "dropout"]).axes[0], "series") == []
    assert len(lines(loss(trials, ["peak_lr"]).axes[0], "series")) == 1


def test_curves_fade_where_stopped_and_the_best_is_bold() -> None:
    from matplotlib.colors import to_hex  # here: it takes seconds

    figure = curves(grid(t002=(3.5, BUDGET // 2, None), t003=(3.6, BUDGET // 5, "failed")))
    by_name = {line.get_gid(): line for line in lines(figure.axes[0], "trial")}
    assert len(by_name) == 6
    assert {name for name, line in by_name.items() if (line.get_alpha() or 1) < 1} == {
        "trial 002",
        "trial 003",
    }
    widest = max(by_name, key=lambda name: by_name[name].get_linewidth())
    assert widest == "trial 000"
    ends = lines(figure.axes[0], "end")
    assert len({line.get_marker() for line in ends}) == 6
    hollow = [line for line in ends if to_hex(line.get_markerfacecolor()) == "#ffffff"]
    assert [float(line.get_ydata()[0]) for line in hollow] == [3.5, 3.6]
    named = legend(figure)
    assert named[:2] == ["000: 3e-4, 4,096", "3.0000, best"]
    assert named[named.index("002: 1e-3, 4,096") + 1] == "3.5000, stopped at 50%"


def test_of_many_curves_only_the_first_are_named() -> None:
    trials = [
        trial(i, {"peak_lr": 1e-3 * 1.1**i}, 3 + 0.01 * i) for i in range(MAX_NAMED_CURVES + 1)
    ]
    figure = curves(trials, ["peak_lr"])
    assert len(lines(figure.axes[0], "trial")) == MAX_NAMED_CURVES + 1
    named = legend(figure)
    assert named[:2] == ["000: 1e-3", "3.0000, best"]
    assert named[-1] == "other trials: 1"
    assert len(named) == 2 * MAX_NAMED_CURVES + 1


def test_a_curve_has_a_gap_where_it_went_on_from_another_trials_weights() -> None:
    points = ((100_000, 5.0), (200_000, 4.5), (200_000, 3.5), (BUDGET, 3.0))
    copied = Trial("000", "finished", {"peak_lr": 1e-3}, 3.0, BUDGET, 1.0, 1.0, "x", None, points)
    line = lines(curves([copied], ["peak_lr"]).axes[0], "trial")[0]
    assert [math.isnan(float(y)) for y in line.get_ydata()] == [False, False, True, False, False]


def test_evaluations_that_were_written_as_null_are_gaps() -> None:
    points = ((100_000, 5.0), (200_000, None), (300_000, None))
    lost = Trial("001", "stopped", {"peak_lr": 3e-3}, None, 300_000, 1.0, 1.0, "x", None, points)
    trials = [trial(0, {"peak_lr": 1e-3}), lost]
    assert "not finite" in legend(curves(trials, ["peak_lr"]))
    assert "001 at 3e-3: not finite" in legend(loss(trials, ["peak_lr"]))


def test_every_cell_of_the_heat_map_has_its_value_in_words() -> None:
    trials = grid(
        t001=(3.9, BUDGET // 4, None), t002=(None, 0, "failed"), t003=(math.inf, BUDGET // 2, None)
    )[:5]
    axes = heat_axes(trials)
    cells = {
        (int(text.get_position()[0]), int(text.get_position()[1])): text.get_text()
        for text in axes.texts
    }
    assert cells == {
        (0, 0): "best\n000\n3.0000",
        (0, 1): "001\n3.9000\nstopped at 25%",
        (1, 0): "002\nfailed",
        (1, 1): "003\nnot finite",
        (2, 0): "004\n3.4000",
        (2, 1): "not tried",
    }
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert len(hatched) == 3
    assert axes.get_ylabel().startswith("global_batch_tokens")


def test_a_cell_with_several_trials_has_the_best_of_them() -> None:
    schedules = [{**t.values, "schedule": s} for s in ("wsd", "cosine") for t in grid()]
    trials = [trial(i, values, 4 - 0.1 * i) for i, values in enumerate(schedules)]
    shown = [t.get_text() for t in heat_axes(trials, [*SPACE, "schedule"]).texts]
    assert "006, best of 2\n3.4000" in shown
    assert len(shown) == 6


def test_a_heat_map_without_a_full_trial_has_no_colours() -> None:
    half = [trial(i, t.values, 3.0, BUDGET // 2) for i, t in enumerate(grid())]
    assert len(heat_map_figure(half, SPACE, "val/loss", BUDGET).axes) == 1


def test_a_dollar_in_a_value_is_no_formula() -> None:
    paths = ("$HOME/a", "$x_{b}$", "a_$")
    trials = [trial(i, {"data_path": path}) for i, path in enumerate(paths)]
    figure = loss(trials, ["data_path"])
    figure.draw_without_rendering()
    shown = [text.get_text() for text in figure.findobj(Text)]
    assert sum("$" in text for text in shown) >= len(paths)
    assert not any(is_math_text(text) for text in shown)


@pytest.mark.parametrize("number", [1, 45])
def test_any_number_of_stopped_trials_can_be_drawn(number: int) -> None:
    stopped = [
        trial(i, {"peak_lr": 1e-4 * 1.05**i}, 5.0 + i / 100, BUDGET // 10) for i in range(number)
    ]
    full = [trial(50 + i, {"peak_lr": 1e-3 * (1 + i)}, 3 + i / 10) for i in range(2)]
    for trials in (stopped, stopped + full):
        figure = curves(trials, ["peak_lr"])
        figure.draw_without_rendering()
        assert len(lines(figure.axes[0], "trial")) == len(trials)
        loss(trials, ["peak_lr"]).draw_without_rendering()


def test_the_scale_keeps_a_bad_trial_and_not_a_diverged_one() -> None:
    assert upper_limit([1.95, 1.96, 1.97, 2.0, 2.1, 2.4]) > 2.4
    assert upper_limit([3.0, 3.01, 3.02, 3.05, 3.1, 3.7]) > 3.7
    assert upper_limit([1.95, 1.96, 2.0, 2.05, 2.1, 7.81]) < 7.81
    assert upper_limit([1.95, 2.0, 2.05, 2.1, 7.81]) == math.inf
