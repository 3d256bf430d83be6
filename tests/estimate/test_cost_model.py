"""Estimates, checked against known figures and against each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from raytrain_gpt import cli
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.core.device import gpu_spec
from raytrain_gpt.core.memory import MemoryModel, TrainingMemory
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.estimate.cost_model import Facts, estimate
from raytrain_gpt.estimate.estimate import estimate_run, lines
from tests.conftest import RunCli
from tests.data.shard_tools import write_dataset

H200 = gpu_spec("NVIDIA H200")
FACTS = Facts(vocab_size=50_257, num_workers=1, bf16=True, train_tokens=10**10)
CONFIG = load_preset("gpt2-124m")


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the traced prediction, which takes seconds; tests/core and the README have it."""
    monkeypatch.setattr(MemoryModel, "predict", lambda *_: TrainingMemory(*[1000] * 5))


@pytest.mark.slow
def test_figures_of_a_run_that_was_done() -> None:
    found = estimate(CONFIG, replace(FACTS, num_workers=4, step_time_s=9.5))
    assert found.steps_per_epoch == 19_073
    assert found.max_steps == 5 * 19_073 == 95_365
    assert found.micro_batches_per_step == 4
    assert found.train_s == pytest.approx(10.5 * 86_400, rel=0.005)
    assert found.speed is not None
    assert found.speed.tokens_per_s == pytest.approx(524_288 / 9.5)


@pytest.mark.slow
def test_the_table_gives_a_speed_only_where_the_peak_is_known() -> None:
    assert estimate(CONFIG, FACTS).train_s is None
    found = estimate(CONFIG, replace(FACTS, device=H200, num_workers=8))
    assert found.speed is not None
    assert found.speed.source == "table"
    assert found.speed.tokens_per_s * found.flops_per_token == pytest.approx(8 * 989e12 * 0.4)
    assert estimate(CONFIG, replace(FACTS, device=H200, bf16=False)).speed is None


def test_muons_products_take_their_share_of_the_tables_speed_only() -> None:
    """Muon's FLOPs for GPT-2 124M by hand: 5 · (4·m²·n + 2·m³) per matrix.

    m is 768, and n is four times 768 (queries, keys, values, output), 3072 and 3072, in each of 12 blocks.
    """
    muon = CONFIG.updated({"optimizer": "muon"})
    facts = replace(FACTS, device=H200, num_workers=8)
    adamw, found = (estimate(config, facts) for config in (CONFIG, muon))
    flops = 12 * 5 * (4 * 768**2 * (12 * 768) + 6 * 2 * 768**3)
    step = found.flops_per_token * 524_288 + flops
    assert found.step_time_s == pytest.approx(step / (8 * 989e12 * 0.4))
    assert found.speed is not None
    tokens_per_s = found.speed.tokens_per_s
    assert found.speed.mfu == pytest.approx(tokens_per_s * found.flops_per_token / (8 * 989e12))
    assert found.speed.mfu < 0.4
    given = replace(facts, step_time_s=0.5)
    assert estimate(muon, given).speed == estimate(CONFIG, given).speed
    assert found.checkpoint_bytes < adamw.checkpoint_bytes


def test_prices_are_device_hours_times_rates() -> None:
    facts = replace(FACTS, num_workers=4, step_time_s=3600.0, price_per_hour=2.0)
    found = estimate(CONFIG.updated({"max_steps": 10, "warmup_steps": 1}), facts)
    assert found.device_hours == pytest.approx(40)
    assert found.price == pytest.approx(80)
    assert found.spot_price is None


def test_the_quickstarts_data_has_bytes_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, found = estimate_run(load_preset("quickstart"), Facts(), print)
    assert found.num_parameters == 836_992
    _, found = estimate_run(
        load_preset("quickstart").updated({"data_path": "other"}), Facts(), print
    )
    assert found.num_parameters == 836_992 + 2 * (50_304 - 320) * 128


def test_a_mixture_has_no_epochs_of_its_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_dataset(tmp_path / name, train=[10_000])
    quickstart, both = load_preset("quickstart"), f"{tmp_path}/one=0.9,{tmp_path}/two=0.1"
    for path, facts, has in (
        (f"{tmp_path}/one", Facts(), True),
        (both, Facts(), False),
        (both, Facts(train_tokens=10**6), True),
    ):
        said = lines(*estimate_run(quickstart.updated({"data_path": path}), facts, print))
        assert (" epochs" in said[2] or " per epoch" in said[2]) == has


def test_the_answer_says_what_is_not_known() -> None:
    config, found = estimate_run(CONFIG, Facts(), print)
    printed = "\n".join(lines(config, found))
    assert "time     unknown: name a --device of the table" in printed
    slow = estimate_run(CONFIG.updated({"precision": "fp32"}), Facts(), print, "h200")
    assert "time     unknown: set --precision to bf16" in "\n".join(lines(*slow))
    assert "124.5M parameters" in printed
    config, found = estimate_run(CONFIG, Facts(price_per_hour=3.0), print, "h200")
    printed = "\n".join(lines(config, found))
    assert "not measured" in printed
    assert "fits NVIDIA H200" in printed
    assert "on demand" in printed


def test_a_device_that_is_not_in_the_table_is_known_by_its_memory() -> None:
    _, found = estimate_run(CONFIG, Facts(), print, "voodoo", device_memory_gb=3)
    assert found.device is not None
    assert (found.device.name, found.device.memory_bytes, found.speed) == ("voodoo", 3e9, None)
    assert "name a --device of the table" in "\n".join(lines(CONFIG, found))
    _, small = estimate_run(CONFIG, Facts(), print, "H200 NVL", device_memory_gb=3)
    assert small.speed is not None
    _, old = estimate_run(CONFIG.updated({"precision": "auto"}), Facts(), print, "T4")
    _, new = estimate_run(CONFIG, Facts(), print, "RTX 4090")
    assert (old.speed, new.speed is None) == (None, False)  # it would train in fp32


def test_an_unknown_device_and_an_odd_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="is ambiguous"):
        estimate_run(CONFIG, Facts(), print, "A100")
    with pytest.raises(ConfigError, match="is not in the table"):
        estimate_run(CONFIG, Facts(), print, "voodoo")
    with pytest.raises(ConfigError, match="does not divide over 7 workers"):
        estimate(CONFIG, replace(FACTS, num_workers=7))


@pytest.mark.parametrize(
    ("text", "name", "others"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", "H100 PCIe, H100 NVL"),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", "A100 80GB PCIe"),
        ("H100 SXM", "NVIDIA H100 80GB HBM3", None),
        ("L4", "NVIDIA L4", None),
    ],
)
def test_a_plain_name_means_the_sxm_variant_and_says_so(
    text: str, name: str, others: str | None
) -> None:
    told: list[str] = []
    _, found = estimate_run(CONFIG, Facts(), told.append, text)
    assert found.device is not None
    assert found.device.name == name
    said = f"device   {text} is {name}, the SXM variant; also in the table: {others}"
    assert told == ([said] if others else [])


@pytest.mark.slow
def test_what_does_not_fit_is_not_to_be_trained_next(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--preset=gpt2-124m", "--device=A10G", "--vocab_size=50257"]
    _, shown, _ = run_cli("estimate", *flags)
    assert "| fits NVIDIA A10G" in shown
    assert "to fit" not in shown
    assert "next: raytrain-gpt train" in shown
    monkeypatch.setattr(MemoryModel, "predict", lambda *_: TrainingMemory(*[10**12] * 5))
    _, shown, _ = run_cli("estimate", *flags)
    assert "DOES NOT FIT" in shown
    assert "to fit   set " in shown
    assert "next: raytrain-gpt train" not in shown


def test_the_command_prints_lines_and_one_object_last(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "gpt2-124m", "--num_workers", "8", "--device", "H200", "--json"]
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["estimate", *flags, "--train_tokens", "10000000000"])
    assert exit_info.value.code == 0
    *printed, last = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("model    124.5M parameters")
    found = json.loads(last)
    assert found["steps_per_epoch"] == 19_073
    assert found["speed"]["source"] == "table"
    assert found["memory"]["total"] == sum(
        found["memory"][part]
        for part in ("weights", "gradients", "moments", "activations", "logits")
    )
