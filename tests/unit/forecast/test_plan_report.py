"""The picture of a plan."""

from interlace.forecast.plan_report import SHADES, PlanPoint, front_figure


def test_a_plan_whose_lengths_are_more_than_twice_the_profiles_is_drawn() -> None:
    """A recipe of robots with a longer horizon than the profile has such lengths."""
    point = PlanPoint(name="far", text="", tokens_per_s=10.0, staleness=0.0, length_shift=1.5, is_front=True)
    assert SHADES[-1] in front_figure([point])
