"""Drift triggers a plan, and only a gain of twice its cost, seen twice, changes a run."""

from interlace.forecast.search.replanner import AT_MOST, RECENT, CostDrift, Replanner


def told(rule: Replanner, step_s: float, times: int) -> None:
    for _ in range(times):
        rule.observe(step_s)


def test_the_error_is_predicted_against_measured() -> None:
    assert Replanner(2.0).observe(2.5) == 2.0 / 2.5 - 1


def test_the_plan_of_a_steady_run_is_old_after_some_steps() -> None:
    rule = Replanner(1.0)
    told(rule, 1.3, AT_MOST - 1)  # a constant error of the profile is no drift
    assert not rule.is_old
    rule.observe(1.3)
    assert rule.is_old and not rule.is_due


def test_one_plan_is_enough_after_a_change_of_the_cluster() -> None:
    rule = Replanner(1.0)
    rule.switch_s = 1.0
    told(rule, 1.0, RECENT)
    rule.expire()
    assert rule.is_due
    assert rule.planned(2.0, 1.0, steps_left=100)
    assert not rule.is_due


def test_steps_before_a_change_of_the_cluster_do_not_count() -> None:
    """The gain of a plan was scaled by the speed on devices that had disappeared."""
    rule = Replanner(1.0)
    rule.switch_s = 70.0
    told(rule, 1.0, RECENT)
    rule.expire()
    told(rule, 2.0, 2)
    assert rule.ratio == 2.0
    assert rule.planned(2.0, 1.5, steps_left=300), "the gain is 0.5 s a step"


def test_drift_makes_a_plan_due() -> None:
    rule = Replanner(1.0)
    told(rule, 1.0, RECENT)
    assert not rule.is_due
    told(rule, 1.2, RECENT)
    assert rule.is_due


def test_a_plan_with_the_lengths_before_a_change_is_repeated_once() -> None:
    """Lengths changed while a search ran, so the residual was constant after it, and the next plan came 25 steps later.

    residual: of the steps after the plan, which was 1.5 before.
    """
    for residual, repeats in ((1.5, False), (2.0, True)):
        rule = Replanner(1.0)
        told(rule, 1.5, RECENT)
        rule.planned(2.0, 2.0, steps_left=100)
        told(rule, 2.0 * residual, RECENT)
        assert rule.is_due is repeats
        rule.planned(3.0, 3.0, steps_left=90)
        told(rule, 3.0 * residual * 1.2, RECENT)
        assert rule.is_due is not repeats  # after a repetition, the difference is an error of the profile


def drifted(switch_s: float) -> Replanner:
    rule = Replanner(1.0)
    rule.switch_s = switch_s
    told(rule, 1.0, RECENT)
    told(rule, 2.0, RECENT)
    return rule


def test_one_plan_is_not_enough() -> None:
    rule = drifted(switch_s=1.0)
    assert not rule.planned(2.0, 1.0, steps_left=100)
    told(rule, 2.0, RECENT)
    assert rule.is_due  # to hear a second time
    assert rule.planned(2.0, 1.0, steps_left=100)


def test_a_small_gain_changes_nothing() -> None:
    rule = drifted(switch_s=0.0)
    for _ in range(3):
        assert not rule.planned(2.0, 1.95, steps_left=100)
        told(rule, 2.0, RECENT)


def test_a_gain_below_the_noise_of_the_profile_changes_nothing() -> None:
    for noise, changes in ((0.1, True), (0.3, False)):
        rule = Replanner(1.0, noise=noise)
        rule.switch_s = 0.0
        told(rule, 1.0, 2 * RECENT)
        rule.planned(1.0, 0.8, steps_left=100)
        told(rule, 1.0, RECENT)
        assert rule.planned(1.0, 0.8, steps_left=100) is changes


def test_a_change_must_pay_its_measured_cost_back_twice() -> None:
    for steps_left, changes in ((15, False), (25, True)):
        rule = drifted(switch_s=10.0)
        rule.planned(2.0, 1.0, steps_left=steps_left)
        told(rule, 2.0, RECENT)
        assert rule.planned(2.0, 1.0, steps_left=steps_left) is changes


def test_a_restart_must_also_pay_back_the_time_that_fills_its_pipeline() -> None:
    """A change that saved 100 s was taken for a restart of 10 s, after which the pipeline took 100 s to fill."""
    for fill_s, changes in ((0.0, True), (100.0, False)):
        rule = drifted(switch_s=10.0)
        rule.planned(2.0, 1.0, steps_left=100, fill_s=fill_s)
        told(rule, 2.0, RECENT)
        assert rule.planned(2.0, 1.0, steps_left=100, fill_s=fill_s) is changes


def test_steps_of_different_lengths_are_compared_with_a_prediction_by_their_mean() -> None:
    """Every fourth step publishes and takes 5 s, the others 1 s: their median was half of the predicted mean of 2 s."""
    rule = Replanner(2.0, period=4)
    for step in range(1, 2 * AT_MOST):
        rule.observe(5.0 if step % 4 == 0 else 1.0)
        if step >= 8:
            assert rule.ratio == 1.0 and rule.left_s(10) == 20.0, "a window has whole periods"
        assert not rule.is_due, "no step of a period is drift"


def test_one_slow_step_is_no_drift() -> None:
    rule = Replanner(1.0)
    told(rule, 1.0, RECENT)
    rule.observe(10.0)
    assert not rule.is_due


def test_a_plan_without_a_decision_is_not_repeated_at_once() -> None:
    rule = drifted(switch_s=1.0)
    assert rule.is_due
    rule.keep()
    told(rule, 2.0, RECENT)
    assert not rule.is_due


def test_no_change_before_its_cost_was_measured() -> None:
    rule = Replanner(1.0)
    told(rule, 2.0, 2 * RECENT)
    assert not rule.planned(2.0, 0.1, steps_left=10**6)
    told(rule, 2.0, RECENT)
    assert not rule.planned(2.0, 0.1, steps_left=10**6)


def test_after_a_change_residuals_begin_anew() -> None:
    rule = drifted(switch_s=1.0)
    rule.changed(0.5, period=4)
    assert rule.predicted_s == 0.5
    assert rule.ratio == 1.0
    assert not rule.is_due


def test_a_change_without_a_restart_needs_one_plan_and_pays_no_cost() -> None:
    rule = drifted(switch_s=1e9)
    assert rule.planned(2.0, 1.0, steps_left=2, restarts=False)
    assert not drifted(switch_s=1e9).planned(2.0, 1.99, steps_left=100, restarts=False)


def test_a_cost_has_drifted_if_the_change_is_a_part_of_the_step() -> None:
    for share, ratio in ((0.5, 4.0), (0.01, 1.0)):
        drift = CostDrift()
        for cost in (1.0,) * RECENT + (4.0,) * RECENT:
            drift.observe(cost, share)
        assert drift.ratio == ratio
        drift.restart()
        assert drift.ratio == 1.0


def test_a_decision_in_place_is_repeated_after_other_drift_only() -> None:
    """The drift stays until the next search, which a short run does not begin."""
    rule = Replanner(1.0)
    told(rule, 1.0, RECENT)
    assert not rule.has_drifted
    told(rule, 1.2, RECENT)
    assert rule.has_drifted
    rule.decided()
    told(rule, 1.25, RECENT)
    assert rule.is_due and not rule.has_drifted
    told(rule, 1.5, RECENT)
    assert rule.has_drifted
    rule.keep()
    assert not rule.has_drifted


def test_a_slow_first_step_is_no_drift() -> None:
    """A decision after the first step compared the later ones with it, which fills the pipeline."""
    rule = Replanner(1.0)
    told(rule, 2.0, 1)
    rule.decided()
    told(rule, 1.0, 2 * RECENT)
    assert not rule.has_drifted
