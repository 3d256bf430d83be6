"""Breakdown of profiled time, from handwritten traces: all time is counted, and each instant once."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.tracking.step_time import (
    DATA_WAIT_SPAN,
    KINDS,
    STEP_SPAN,
    StepTimeBreakdown,
    time_use,
)

TRAINS, BACKWARD, OTHER = 1, 2, 3
"""Thread ids."""


def span(name: str, start: float, end: float, thread: int = TRAINS, **more: Any) -> dict[str, Any]:
    """Make an event, by default of an operator (see `cat`); times in milliseconds."""
    event = {"ph": "X", "cat": "cpu_op", "name": name, "tid": thread, "args": {}}
    return {**event, "ts": 1e12 + 1000 * start, "dur": 1000 * (end - start), **more}


def note(name: str, start: float, end: float, thread: int = TRAINS) -> dict[str, Any]:
    return span(name, start, end, thread, cat="user_annotation")


def kernel(
    name: str, start: float, end: float, launched_by: int, cat: str = "kernel"
) -> dict[str, Any]:
    return span(name, start, end, 7, cat=cat, args={"External id": launched_by, "stream": 7})


def use_of(*events: dict[str, Any]) -> StepTimeBreakdown:
    other = {"ph": "i", "name": "Record Window End", "ts": 0}
    return time_use({"traceEvents": [*events, other]}, first_step=6)


def spent_ms(use: StepTimeBreakdown) -> dict[str, float]:
    """Return kind -> milliseconds, without kinds of zero time."""
    return {k: pytest.approx(1000 * s) for k, s in use.kinds_s.items() if s}  # type: ignore[misc]


def test_time_on_a_cpu_goes_to_the_innermost_operator() -> None:
    use = use_of(
        note(STEP_SPAN, 0, 100),
        note(DATA_WAIT_SPAN, 0, 5),
        span("aten::copy_", 1, 2),
        note("DistributedDataParallel.forward", 5, 60),
        span("aten::linear", 10, 20),
        span("aten::t", 10, 11),
        span("aten::addmm", 11, 20),
        span("aten::scaled_dot_product_attention", 20, 30),
        span("aten::bmm", 20, 29),
        span("aten::gelu", 30, 34),
        span("aten::cross_entropy_loss", 40, 50),
        span("aten::_log_softmax", 40, 48),
        span("aten::mm", 50, 55),
        note("Optimizer.step#AdamW.step", 80, 90),
        span("aten::mul", 81, 82),
        span("aten::_foreach_norm", 90, 91),
    )
    assert (use.device, use.num_steps, use.total_s) == ("cpu", 1, pytest.approx(0.1))
    assert spent_ms(use) == {
        "matmul": 15,
        "attention": 10,
        "elementwise": 4,
        "loss": 10,
        "optimizer": 11,
        "data_wait": 5,
        "rest": 45,
    }
    own = {o["name"]: (o["kind"], pytest.approx(1000 * o["time_s"])) for o in use.operators}
    assert own["aten::bmm"] == ("attention", 9)
    assert "aten::linear" not in own  # its inner operators have all of its time
    assert own["aten::_log_softmax"] == ("loss", 8)


def test_products_of_muon_are_the_optimizers() -> None:
    step_of_muon = (
        note("Optimizer.step#Muon.step", 10, 40),
        span("aten::baddbmm", 15, 35, args={"External id": 1}),
    )
    assert spent_ms(use_of(note(STEP_SPAN, 0, 50), *step_of_muon)) == {"optimizer": 30, "rest": 20}
    on_gpu = kernel("nvjet_tst_128x256", 20, 45, 1)
    use = use_of(note(STEP_SPAN, 0, 50), *step_of_muon, on_gpu)
    assert spent_ms(use) == {"optimizer": 25, "rest": 25}


def test_compiled_code_is_what_its_operators_are() -> None:
    use = use_of(
        note(STEP_SPAN, 0, 100),
        span("Torch-Compiled Region: 0/0", 0, 60),
        span("TorchDynamo Cache Lookup", 0, 5),
        span("CompiledFunction", 5, 60),
        span("## Call CompiledFxGraph abc ##", 10, 60),
        span("aten::addmm", 20, 40),
        span("aten::_scaled_dot_product_flash_attention_for_cpu", 40, 50),
        span("_ChunkedMean", 60, 90),
        span("aten::mm", 60, 70),
        span("aten::exp_", 70, 80),
    )
    expected = {"matmul": 30, "attention": 10, "elementwise": 20, "loss": 20, "rest": 20}
    assert spent_ms(use) == expected


def test_what_lies_outside_of_the_steps_does_not_count() -> None:
    use = use_of(
        span("aten::mm", 0, 20),
        note(STEP_SPAN, 10, 30),
        span("aten::mm", 40, 50),
        note(STEP_SPAN, 50, 70),
        span("aten::gelu", 60, 70),
        span("aten::mm", 71, 99),
    )
    assert spent_ms(use) == {"matmul": 10, "elementwise": 10, "rest": 20}
    assert use.num_steps == 2
    assert use.title().startswith("steps 6 to 7, 20.0 ms per step")


def test_waiting_for_another_threads_collective_is_communication() -> None:
    use = use_of(
        note(STEP_SPAN, 0, 100),
        span("aten::mm", 0, 50),
        note("gloo:all_reduce", 30, 70, OTHER),
        note("gloo:all_reduce", 60, 80, BACKWARD),
        span("aten::add", 75, 78),
    )
    assert spent_ms(use) == {"matmul": 50, "communication": 27, "elementwise": 3, "rest": 20}


def test_time_on_a_gpu_goes_to_the_kernels() -> None:
    use = use_of(
        note(STEP_SPAN, 0, 100),
        note(DATA_WAIT_SPAN, 0, 8),
        span("aten::to", 1, 2, args={"External id": 1}),
        span("aten::mm", 10, 11, args={"External id": 2}),
        note("## Call CompiledFxGraph f ##", 11, 14),
        span("triton_per_fused", 12, 13, args={"External id": 3}),
        span("autograd::engine::evaluate_function: AddmmBackward0", 14, 18, BACKWARD),
        span("aten::sum", 15, 16, BACKWARD, args={"External id": 4}),
        note("Optimizer.step#AdamW.step", 20, 24),
        span("aten::_fused_adamw_", 21, 22, args={"External id": 5}),
        kernel(STEP_SPAN, 2, 80, 0, cat="gpu_user_annotation"),  # torch copies spans to the GPU
        kernel("Memcpy HtoD", 2, 4, 1, cat="gpu_memcpy"),
        kernel("nvjet_tst_128x256", 12, 40, 2),
        kernel("triton_red_fused__log_softmax_nll_loss_3", 40, 50, 3),
        kernel("triton_poi_fused_gelu_1", 50, 55, 3),
        kernel("reduce_kernel", 55, 60, 4),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 45, 70, 99),
        kernel("multi_tensor_apply_kernel", 72, 80, 5),
        kernel("later", 101, 120, 2),
    )
    assert use.device == "cuda"
    assert spent_ms(use) == {
        "matmul": 33,
        "elementwise": 7,
        "loss": 10,
        "optimizer": 8,
        "communication": 10,
        "data_wait": 6,
        "rest": 26,
    }
    assert use.operators[0]["name"] == "nvjet_tst_128x256"
    assert "rest (GPU idle)" in use.text()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 99),
            st.integers(1, 60),
            st.sampled_from(["aten::mm", "aten::gelu", "gloo:all_reduce", STEP_SPAN, "x"]),
            st.sampled_from([TRAINS, OTHER]),
            st.sampled_from(["cpu_op", "user_annotation", "kernel"]),
        ),
        max_size=30,
    )
)
def test_the_parts_always_add_up(drawn: list[tuple[int, int, str, int, str]]) -> None:
    events = [
        span(name, at, at + long, thread, cat=cat)
        for at, long, name, thread, cat in drawn
        if name != STEP_SPAN
    ]
    use = use_of(note(STEP_SPAN, 10, 50), note(STEP_SPAN, 55, 90), *events)
    assert use.total_s == pytest.approx(0.075)
    assert sum(use.kinds_s.values()) == pytest.approx(use.total_s)
    assert list(use.kinds_s) == list(KINDS)
    assert sum(o["time_s"] for o in use.operators) <= use.total_s + 1e-9
    assert StepTimeBreakdown.of_row(json.loads(json.dumps(asdict(use)))).text() == use.text()
