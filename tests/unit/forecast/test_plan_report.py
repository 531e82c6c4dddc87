"""The picture of a plan."""

from interlace.forecast.plan_report import SHADES, PlanPoint, front_figure, plan_page


def test_a_plan_whose_lengths_are_more_than_twice_the_profiles_is_drawn() -> None:
    """A recipe of robots with a longer horizon than the profile has such lengths."""
    point = PlanPoint(name="far", text="", tokens_per_s=10.0, staleness=0.0, length_shift=1.5, is_front=True)
    assert SHADES[-1] in front_figure([point])


def test_staleness_is_in_versions_as_the_planner_bounds_it() -> None:
    """With several steps a version, a sample of one version may lag several steps."""
    point = PlanPoint(name="b", text="sync_every: 4", tokens_per_s=10.0, staleness=1.0, length_shift=0.0, is_front=True)
    page = plan_page("a plan", [point], [])
    assert "1 versions" in page and "versions stale at most" in page and "steps" not in page
