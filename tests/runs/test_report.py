"""The report is built from files only; these tests write such files, without Ray or a model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.runs.report import MAX_SAMPLE_SETS, RunHistory, write_comparison, write_report
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import CONFIG_FILE, METRICS_FILE, SAMPLES_FILE, RunSync
from tests.training import STATE

from .test_pages import check_page

PROMPT = "<b>def</b> "


def start(event: str, step: int, time: float, **more: Any) -> Row:
    return {"step": step, "event": event, "time": time, "attempt": 1, "num_workers": 2, **more}


def attempt(step: int, time: float, session: str = "a", lost_steps: int = 0) -> Row:
    lost = {"lost_steps": lost_steps, "lost_s": lost_steps * 0.25}
    return start("attempt", step, time, session=session, **lost)


def checkpoint(step: int, time: float, blocked_s: float = 0.0, write_s: float = 0.0) -> Row:
    timing = {"perf/checkpoint_blocked_s": blocked_s, "perf/checkpoint_write_s": write_s}
    return start("checkpoint", step, time, **timing)


def step_row(step: int, **changed: Any) -> Row:
    row = {
        "step": step,
        "train/loss": 5.0 - step / 100,
        "optim/lr": 1e-3,
        "optim/grad_norm": 1.0 + step % 3,
        "perf/tokens_per_s": 13_000.0,
        "perf/step_time_s": 0.25,
        "perf/data_wait_s": 0.025,
        "perf/mfu": None,
        "data/epoch": 0,
        "data/tokens_seen": 4096 * step,
        "data/order_hash": f"{step:016x}",
    }
    return {**row, **{key.replace("__", "/"): value for key, value in changed.items()}}


def eval_row(step: int, loss: float | None) -> Row:
    values = {"val/perplexity": 18.3, "val/bits_per_byte": 4.25}
    values |= {"hellaswag/acc": 0.271, "hellaswag/acc_norm": 0.2875, "hellaswag/examples": 1000}
    return {"step": step, "val/loss": loss, **values, "perf/eval_s": 3.0}


def make_run(
    path: Path,
    rows: list[Row],
    samples: dict[int, list[str]] | None = None,
    checkpoint: int | None = None,
    manifest_hash: str = "aaaa",
    **fields: Any,
) -> RunSync:
    path.mkdir(parents=True)
    config = Config().updated({"max_steps": 60, "sample_prompt": PROMPT, **fields})
    (path / CONFIG_FILE).write_text(config.to_yaml(), "utf-8")
    (path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    sets = {
        at: "\n".join(f"{i}: {text!r}" for i, text in enumerate(texts))
        for at, texts in (samples or {}).items()
    }
    text = "".join(f"=== step {step} ===\n{lines}\n" for step, lines in sets.items())
    (path / SAMPLES_FILE).write_text(text, "utf-8")
    if checkpoint is not None:
        order_hash = f"{checkpoint:016x}"
        facts = {"order_hash": order_hash, "val_loss": 2.5, "manifest_hash": manifest_hash}
        state = replace(STATE, step=checkpoint, **facts)
        Catalog(Location.of(path)).draft(checkpoint, "001").commit(state, {}, {})
    return RunSync(Location.of(path))


def steps(last: int) -> list[Row]:
    return [step_row(step) for step in range(1, last + 1)]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> RunSync:
    facts = {"num_parameters": 124_440_000, "train_tokens": 1_000_000, "tokenizer": "gpt2<"}
    rows = [
        attempt(0, 0.5),
        start("start", 0, 1.0),
        *steps(30),
        eval_row(30, 3.5),
        checkpoint(30, 2.0),
        {**attempt(30, 2.5, "b"), **facts},
        start("resume", 30, 3.0, num_workers=4, precision="bf16"),
        *(step_row(step) for step in range(31, 61)),
        eval_row(60, 2.5),
        checkpoint(60, 4.0),
    ]
    texts = [PROMPT + "<script>alert('x')</script>\n    return", "no prompt </pre>"]
    return make_run(
        tmp_path_factory.mktemp("runs") / "full", rows, {30: texts, 60: texts}, checkpoint=60
    )


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no charts, which takes seconds."""
    monkeypatch.setattr("raytrain_gpt.runs.pages.draw", lambda chart: "")


def page(path: Path) -> str:
    return path.read_text("utf-8")


def test_numbers_of_a_finished_run(full_run: RunSync) -> None:
    path = write_report(full_run)
    assert path == full_run.work_dir / "report.html"
    html = page(path)
    check_page(html)
    for text in (
        "<h1>full</h1>", "of 60, finished", "2, then 4 workers", "4.4000", "2.5000", "4.2500",
        "245.8k", "13.0k", "15s", "hellaswag/acc_norm", "0.2875",
        "124.4M", "train tokens, tokenizer gpt2&lt;; 0.25 epochs seen", "precision bf16",
        f"step 60: {60:016x}", "manifest hash", "1–30", "31–60", "peak_lr", "resumed after step 30",
        "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;\n    return", "no prompt &lt;/pre&gt;",
    ):  # fmt: skip
        assert text in html, text
    titles = ("Loss", "Loss, after step 30", "hellaswag/acc_norm", "Learning rate",
              "Gradient norm before clipping", "Throughput", "Waiting for data")  # fmt: skip
    assert tuple(re.findall(r"<figcaption><b>(.*?)</b>", html)) == titles
    assert html.count('class="resume"') == 6  # all charts except the one that starts after step 30


def test_a_mixture_has_no_epochs_of_its_own(tmp_path: Path) -> None:
    facts = {"train_tokens": 1_000_000, "tokenizer": "gpt2"}
    rows = [{**attempt(0, 0.5), **facts}, *steps(60)]
    notes = [
        [note for name, _, note in RunHistory(run).numbers() if name == "Data"]
        for run in (
            make_run(tmp_path / "one", rows),
            make_run(tmp_path / "mixed", rows, data_path="data/b=0.9,data/c=0.1"),
        )
    ]
    of_both = "train tokens, tokenizer gpt2"
    assert notes == [[f"{of_both}; 0.25 epochs seen"], [of_both]]


@pytest.mark.usefixtures("undrawn")
def test_a_loss_spike_is_marked_and_a_high_norm_is_not(tmp_path: Path) -> None:
    zscores = {34: 9.0, 40: 2.0, 50: None}
    spikes = [start("spike", s, float(s), loss=8.0, loss_zscore=z) for s, z in zscores.items()]
    run = make_run(tmp_path / "run", [attempt(0, 0.5), *steps(60), *spikes])
    loss = RunHistory(run).charts()[0]
    assert [(c.xs.tolist(), c.values.tolist()) for c in loss.curves if c.label == "spike"] == [
        ([34.0], [8.0])
    ]
    assert "▼" in page(write_report(run))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_goodput_and_every_kind_of_end(tmp_path: Path) -> None:
    rows = [
        attempt(0, 100.0),
        start("start", 0, 105.0),
        checkpoint(20, 110.0, blocked_s=0.5),
        start("failed", 25, 115.0, error="<OSError>: gone"),
        attempt(20, 120.0, lost_steps=5),
        start("preempted", 20, 122.0),
        attempt(20, 125.0),
        start("resume", 20, 130.0, num_workers=4),
        start("spike", 41, 136.0),
        start("nonfinite", 42, 136.5),
        start("rollback", 40, 137.0, to_step=40, first_batch=40, stop_batch=42),
        start("rolled_back", 42, 137.0),
        attempt(40, 140.0, lost_steps=2),
        start("resume", 40, 145.0),
        start("hung", 50, 150.0),
        attempt(50, 151.0),
        start("resume", 50, 155.0),
        checkpoint(60, 159.0, write_s=1.5),
        start("finished", 60, 160.0),
        *steps(60),
        eval_row(60, 2.5),
    ]
    run = make_run(tmp_path / "run", rows, checkpoint=60)
    story = RunHistory(run)
    html = page(write_report(run))
    attempts = [(a.row["event"], a.row["step"], a.kept, a.end["event"]) for a in story.attempts]
    assert attempts == [
        ("start", 0, range(1, 21), "failed"),
        ("no step", 20, range(0), "preempted"),
        ("resume", 20, range(21, 41), "rolled_back"),
        ("resume", 40, range(41, 51), "hung"),
        ("resume", 50, range(51, 61), "finished"),
    ]
    for text in (
        "goodput 22.5% of 1m 0s", "4 restarts (1 failed, 1 preempted, 1 rolled back, 1 hung)",
        "7 steps repeated (2 of them rolled back)", "failed &lt;OSError&gt;: gone",
        "rollback to step 40, batches 40 to 41 skipped; rolled back</td>",
    ):  # fmt: skip
        assert text in html, text
    assert story.charts()[0].marks == [20, 40, 50]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_an_attempt_that_goes_on_has_no_end(tmp_path: Path) -> None:
    rows = [attempt(0, 1.0), start("start", 0, 2.0), *steps(7)]
    assert "killed</td>" not in page(write_report(make_run(tmp_path / "run", rows)))
    rows = [*rows, attempt(0, 9.0, "b")]
    path = write_report(make_run(tmp_path / "killed", rows))
    assert page(path).count("killed</td>") == 1


UNFINISHED: dict[str, list[Row]] = {
    "nothing": [],
    "started": [start("start", 0, 1.0)],
    "one step": steps(1),
    "no evaluation": [start("start", 0, 1.0), *steps(7)],
    "null losses": [step_row(s, train__loss=None, optim__grad_norm=None) for s in range(1, 50)],
    "null eval": [*steps(40), eval_row(40, None)],
    "only eval": [eval_row(0, 3.0)],
}


def test_unfinished_runs_have_a_page_and_are_compared(tmp_path: Path) -> None:
    check_page(page(write_report(RunSync(Location.of(tmp_path)))))
    runs = {name: make_run(tmp_path / name, rows) for name, rows in UNFINISHED.items()}
    for name, run in runs.items():
        html = page(write_report(run))
        check_page(html)
        assert "not finished" in html
        assert ("not finite in 49 steps, first in step 1" in html) == (name == "null losses")
    for some in ([runs["nothing"]] * 2, [*runs.values()]):
        check_page(page(write_comparison(some, tmp_path / "both.html")))


def test_samples_are_spread_over_a_long_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps(3), {step: [f"at {step}"] for step in range(1, 101)})
    sets = RunHistory(run).samples()
    assert len(sets) == MAX_SAMPLE_SETS
    assert (sets[0], sets[-1]) == ((1, ["at 1"]), (100, ["at 100"]))


def test_datasets_of_a_mixture_have_curves_of_their_own(tmp_path: Path) -> None:
    losses = {"val/loss/web": 3.0, "val/loss/code": None}
    rows = [*steps(4), {**eval_row(2, 3.5), **losses}, {**eval_row(4, 3.4), **losses}]
    charts = {chart.title: chart for chart in RunHistory(make_run(tmp_path / "run", rows)).charts()}
    code, web = charts["Validation loss by dataset"].curves
    assert (code.label, web.label) == ("code", "web")
    np.testing.assert_array_equal(code.values, [np.nan, np.nan])
    np.testing.assert_array_equal(web.values, [3.0, 3.0])
    assert web.xs.tolist() == [2, 4]


def test_the_ranks_have_curves_of_their_own(tmp_path: Path) -> None:
    two, three = [0.1, 0.2], [0.1, 0.15, 0.3]
    rows = [step_row(step) for step in range(1, 5)]
    for row, seconds in zip(rows[1:], (two, three, [0.1, "x"]), strict=True):
        row |= {"perf/rank_forward_s": seconds, "perf/rank_data_wait_s": [0.0] * len(seconds)}
    charts = {chart.title: chart for chart in RunHistory(make_run(tmp_path / "run", rows)).charts()}
    assert "Waiting for data by rank" not in charts  # nobody waited
    curves = charts["Forward passes by rank"].curves
    assert [(curve.label, curve.xs.tolist()) for curve in curves] == [
        (f"rank {rank}", [2, 3]) for rank in range(3)
    ]
    np.testing.assert_array_equal(curves[1].values, [0.2, 0.15])
    np.testing.assert_array_equal(curves[2].values, [np.nan, 0.3])


def test_a_mean_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    losses = [1.0, 3.0, None, 5.0, None, None, None]
    rows = [step_row(step, train__loss=loss) for step, loss in enumerate(losses, 1)]
    means = RunHistory(make_run(tmp_path / "run", rows)).running_mean("train/loss", 3)
    np.testing.assert_allclose(means, [1.0, 2.0, 2.0, 4.0, 5.0, 5.0, np.nan])


def test_comparison(full_run: RunSync, tmp_path: Path) -> None:
    same = make_run(tmp_path / "same", [*steps(50), eval_row(50, 3.0)], checkpoint=50, peak_lr=2e-3)
    other_order = [step_row(s, data__order_hash=f"{s + (s > 9):016x}") for s in range(1, 51)]
    other = make_run(tmp_path / "other", other_order, checkpoint=50)
    elsewhere = make_run(tmp_path / "elsewhere", steps(50), checkpoint=50, manifest_hash="bbbb")
    unsaved = make_run(tmp_path / "unsaved", steps(50))
    runs = [full_run, same, other, elsewhere, unsaved]
    html = page(write_comparison(runs, tmp_path / "comparison.html"))
    check_page(html)
    assert "Same data as full up to step 50, the last common one" in html
    verdicts = re.findall(r'<td(?: class="wrap")?>((?:yes|no,|same order)[^<]*)</td>', html)
    assert verdicts == [
        "yes",
        "yes",
        "no, differs from step 10",
        "no, the same order of other data",
        "same order; dataset unknown before a checkpoint",
    ]
    differing = html[html.index("Differing configuration") :]
    assert "<td>peak_lr</td>" in differing
    assert "0.002" in differing
    assert "run_name" not in differing
    assert "seed" not in differing
    # Five train curves with five different pairs of color and dash, each with a legend entry.
    figure = html[html.index("Train loss") : html.index("</figure>")]
    keys = re.findall(
        r'stroke="(var\(--c\d\))" stroke-width="[\d.]+" stroke-dasharray="(.*?)"', figure
    )
    assert len(set(keys)) == len(runs)
    for run in runs:
        assert f"</svg>{run.run_dir.name}</span>" in figure


def test_runs_of_one_name_and_other_batches_are_compared_by_tokens(tmp_path: Path) -> None:
    runs = []
    for n in (1, 4):
        rows = [step_row(s, data__tokens_seen=n * 1024 * s) for s in range(1, 21)]
        runs.append(make_run(tmp_path / f"{n}" / "run", [*rows, eval_row(20, 3.0)]))
    html = page(write_comparison(runs, tmp_path / "both.html"))
    assert "Validation loss, after 10.2k tokens" in re.findall(r"<figcaption><b>(.*?)</b>", html)
    # The chart of the later half shows both runs, although one ended long before the other.
    figure = html[html.index("Train loss, mean of 1 step, after 10.2k tokens") :]
    assert figure[: figure.index("</figure>")].count('class="key"') == 2
    assert ">tokens</text>" in figure
    assert all(f"<td>{run.run_dir}</td>" in html or f'">{run.run_dir}</td>' in html for run in runs)
