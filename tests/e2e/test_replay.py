"""Replayed trajectories are exact across a resume, the same under every placement, and improve training."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.run.recipe.load import load_recipe
from tests.support.robots import DOT, played, run
from tests.support.training import equal_weights, final_weights, metrics, samples

pytest.importorskip("gymnasium")
AGAIN = (*DOT, "warmup.steps=20", "task.starts.heldout_size=0", "prompts_per_step=2", "minibatches=1", "steps=3")
IMITATION = "replay={learner: imitation, draw_size: 6, updates: 2, loss_weight: 0.5, in_memory_mib: 0.01}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("again")
    run(root, "whole", [*AGAIN, IMITATION])
    return root


def test_a_step_says_what_was_kept_drawn_and_learnt(whole: Path) -> None:
    lines = metrics(whole, "whole")
    assert [line["replay/size"] for line in lines] == [8, 16, 24]
    assert all(line["samples/trained"] == 8 for line in lines), "each sample of the flow is trained on-policy once"
    drawing = [line for line in lines if line["replay/drawn"]]
    assert drawing and all(line["replay/loss"] > 0 and line["replay/uses"] >= 1 for line in drawing)
    assert max(line["replay/staleness_max"] for line in drawing) >= 1
    assert all(line["replay/in_memory"] < line["replay/size"] for line in lines), "the rest is on disk"


def test_a_stopped_run_draws_on_as_if_it_had_not_stopped(whole: Path) -> None:
    run(whole, "stopped", [*AGAIN, IMITATION], stop_after=1)
    assert run(whole, "stopped", [*AGAIN, IMITATION], resume=True).done_steps == 3
    assert played(whole, "stopped")[1:] == played(whole, "whole")[1:]
    assert equal_weights(final_weights(whole, "stopped"), final_weights(whole, "whole"))


@pytest.mark.parametrize("overrides", [("schedule.preset=rlinf-disaggregated",), ("schedule.preset=rlinf-hybrid",)])
def test_no_placement_changes_what_is_learnt_again(whole: Path, overrides: Sequence[str]) -> None:
    run(whole, overrides[0][-8:], [*AGAIN, IMITATION, *overrides])
    assert samples(whole, overrides[0][-8:]) == samples(whole, "whole")
    ours, theirs = final_weights(whole, overrides[0][-8:]), final_weights(whole, "whole")
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in theirs) < 1e-5


def test_a_policy_gradient_of_bounded_staleness_draws_nothing_older(tmp_path: Path) -> None:
    bounded = "replay={learner: policy_gradient, draw_size: 6, max_versions_behind: 1, order: priority}"
    run(tmp_path, "gradient", [*AGAIN, bounded, "steps=4"])
    lines = metrics(tmp_path, "gradient")
    assert max(line["replay/staleness_max"] for line in lines) == 1
    assert all(line["replay/drawn"] == 6 and "replay/ratio_mean" in line for line in lines)


def test_a_policy_gradient_without_a_bound_is_refused() -> None:
    with pytest.raises(UserError, match="max_versions_behind"):
        load_recipe("robot-cartpole", ["replay={learner: policy_gradient}"])


def test_imitating_its_successes_makes_a_policy_better_than_without(tmp_path: Path) -> None:
    short = "episode.env.settings={tasks: [near, far], horizon: 6}"
    settings = [*AGAIN, "warmup.steps=4", "optimizer.lr=2e-3", "steps=6", "prompts_per_step=8", short]
    run(tmp_path, "once", settings)
    run(tmp_path, "again", [*settings, "replay={learner: imitation, draw_size: 32, updates: 8}"])
    once, again = ([line["env/success"] for line in metrics(tmp_path, name)] for name in ("once", "again"))
    assert once[0] == again[0], "nothing is learnt before the first episodes"
    assert sum(again[-3:]) / 3 >= again[0] + 0.2
    assert sum(again[-3:]) > sum(once[-3:])
