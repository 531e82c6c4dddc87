"""The offset of another process's clock is known up to the message delay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.runtime.process.rank import DRIFT, ClockOffset

DELAYS = st.floats(0, 0.1)
EXCHANGES = st.lists(st.tuples(DELAYS, st.floats(0, 2), DELAYS, st.floats(0, 100)), min_size=1, max_size=20)


@given(st.floats(-1e6, 1e6), st.floats(-0.9 * DRIFT, 0.9 * DRIFT), EXCHANGES)
def test_the_true_offset_is_within_the_stated_error(
    offset_s: float, drift: float, exchanges: list[tuple[float, float, float, float]]
) -> None:
    """Whatever the messages took, and however much the work between them."""

    def there(now_s: float) -> float:
        return offset_s + now_s * (1 + drift)

    clock, now_s = ClockOffset(), 0.0
    for out_s, work_s, back_s, pause_s in exchanges:
        received_s = now_s + out_s + work_s + back_s
        clock.add_exchange(
            sent_s=now_s,
            start_there_s=there(now_s + out_s),
            end_there_s=there(now_s + out_s + work_s),
            received_s=received_s,
        )
        true_s = there(received_s) - received_s
        slack_s = 1e-6 + DRIFT * (received_s - now_s)  # rounding; the clocks drift during the exchange too
        assert abs(clock.offset_s - true_s) <= clock.error_s + slack_s
        assert clock.error_s <= (out_s + back_s) / 2 + 2 * slack_s, "never worse than the last exchange alone"
        assert abs(clock.here(there(received_s)) - received_s) <= clock.error_s + slack_s
        now_s = received_s + pause_s


def test_quick_exchanges_sharpen_what_slow_ones_said() -> None:
    clock = ClockOffset()
    clock.add_exchange(sent_s=0.0, start_there_s=100.5, end_there_s=100.6, received_s=1.0)
    assert clock.error_s == pytest.approx(0.45, rel=1e-3)
    clock.add_exchange(sent_s=2.0, start_there_s=102.001, end_there_s=103.0, received_s=3.001)
    assert clock.error_s < 0.002 and abs(clock.offset_s - 100) < 0.002


def test_a_clock_that_was_set_is_learnt_anew() -> None:
    clock = ClockOffset()
    clock.add_exchange(sent_s=0.0, start_there_s=100.0, end_there_s=100.0, received_s=0.0)
    clock.add_exchange(sent_s=1.0, start_there_s=51.0, end_there_s=51.0, received_s=1.0)
    assert clock.offset_s == 50
