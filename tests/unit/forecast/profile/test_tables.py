"""The table of a profile contains every measured role."""

import io

from rich.console import Console

from interlace.forecast.profile.tables import profile_tables
from interlace.forecast.profile.types import InferenceCosts, Interference, Profile, RolloutCosts, TrainCosts

PROFILE = Profile(
    device="cpu, one core of something",
    device_memory_bytes=2**30,
    rollout=RolloutCosts(steps=((1, 1e-3), (8, 2e-3)), kv_tokens=100),
    actor=TrainCosts(token_s=1e-4, inference_token_s=2e-5, optimizer_s=0.5),
)


def shown(profile: Profile) -> str:
    console = Console(file=io.StringIO(), width=200)
    for table in profile_tables(profile):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_costs_have_units_and_rates() -> None:
    text = shown(PROFILE)
    for expected in ("one core of something", "4,000 tokens/s", "10,000 tokens/s", "50,000 tokens/s", "500 ms", "2 ms"):
        assert expected in text, expected
    assert "reference" not in text and "Side by side" not in text


def test_what_was_measured_is_there() -> None:
    more = {
        "reference": InferenceCosts(token_s=1e-3),
        "interference": (Interference(role="actor", beside="rollout", slowdown=1.5),),
    }
    text = shown(PROFILE.model_copy(update=more))
    assert "reference" in text and "1,000 tokens/s" in text
    assert "beside rollout" in text and "1.50x as long" in text
