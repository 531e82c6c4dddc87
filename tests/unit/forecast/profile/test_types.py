"""The costs of a profile are consistent: decode steps, memory, several devices and concurrent work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.forecast.profile.types import RolloutCosts, StateCosts, speed_up


def test_a_decode_step_is_linear_between_measured_batches_and_beyond() -> None:
    costs = RolloutCosts(steps=((1, 0.010), (8, 0.017), (16, 0.033)), kv_tokens=100)
    assert costs.step_s(1) == pytest.approx(0.010)
    assert costs.step_s(4) == pytest.approx(0.013)
    assert costs.step_s(16) == pytest.approx(0.033)
    assert costs.step_s(32) == pytest.approx(0.065)


@given(st.integers(1, 512))
def test_one_device_is_never_faster_than_two(num_devices: int) -> None:
    assert 1 <= speed_up(num_devices, 0.9) <= num_devices


def test_state_is_sharded_and_buffers_are_not() -> None:
    assert StateCosts(state_bytes=80, device_bytes=5).memory_bytes(4) == 25


@pytest.mark.parametrize("steps", [[], [[8, 0.1], [4, 0.2]], [[1, 0.0]]])
def test_decode_steps_that_make_no_sense_are_refused(steps: list[list[float]]) -> None:
    with pytest.raises(UserError, match=r"steps|decode step"):
        RolloutCosts.parse({"steps": steps, "kv_tokens": 1})


def test_an_instance_may_be_no_faster_on_several_devices() -> None:
    assert speed_up(8, 0.5) == 1
