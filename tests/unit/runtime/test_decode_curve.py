"""Underfilled batches are detected from the engine's measured speed."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from interlace.runtime.decode_curve import DecodeCurve
from interlace.runtime.timeline import EngineCall, Span


def call(batch: int, seconds: float, *, steps: int = 10, prompt_tokens: int = 0) -> EngineCall:
    span = Span(
        start_s=0.0, end_s=seconds, devices=(0,), group="rollout/0", rank=0, operation="serve", cause="generate",
        step=1, version=0,
    )  # fmt: skip
    return EngineCall(
        span=span, devices=(0,), batch=batch, num_new_tokens=batch * steps, num_prompt_tokens=prompt_tokens,
        num_repeated_tokens=0,
    )  # fmt: skip


def underfilled(step_s: Callable[[int], float], batches: list[int]) -> list[int]:
    """Of an engine whose decode step takes so long at a batch."""
    curve = DecodeCurve()
    for _ in range(3):
        for batch in batches:
            curve.observe(call(batch, 10 * step_s(batch)))
    return [batch for batch in batches if curve.is_underfilled(batch)]


def test_where_a_step_costs_the_same_at_any_batch_half_of_the_largest_is_the_limit() -> None:
    assert underfilled(lambda _: 0.01, [1, 2, 4, 8, 16, 32, 64]) == [1, 2, 4, 8, 16]


def test_where_computing_is_the_limit_from_a_batch_of_four_on_only_less_is_too_small() -> None:
    assert underfilled(lambda batch: 0.01 * max(1.0, batch / 4), [1, 2, 4, 8, 16, 32, 64]) == [1]


def test_where_a_step_costs_by_the_sequence_no_batch_is_too_small() -> None:
    assert underfilled(lambda batch: 0.01 * batch, [1, 8, 64]) == []


def test_an_outlier_and_what_mostly_read_prompts_prove_nothing() -> None:
    curve = DecodeCurve()
    for _ in range(3):
        curve.observe(call(4, 1.0))
        curve.observe(call(64, 0.001, prompt_tokens=10_000))
    curve.observe(call(32, 0.001))
    assert not curve.is_underfilled(4) and curve.tokens_per_s(64) is None
    assert not curve.is_underfilled(64), "nothing is known of it"


def test_the_parts_of_batch_and_context_are_told_apart_and_the_size_of_the_cache_is_found() -> None:
    curve = DecodeCurve()
    assert curve.costs() is None
    for batch in (2, 8, 32):
        for held in (1_000.0, 20_000.0, 50_000.0):
            seconds = 10 * (0.01 + 0.0001 * batch + 1e-7 * held)
            curve.observe(replace(call(batch, seconds), num_held_tokens=held, kv_use=held / 100_000))
    found = curve.costs()
    assert found is not None
    assert found.context_token_s == pytest.approx(1e-7)
    assert found.kv_tokens == pytest.approx(100_000)
    assert [step for pair in found.steps for step in pair] == pytest.approx([2, 0.0102, 8, 0.0108, 32, 0.0132])
