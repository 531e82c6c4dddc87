"""`interlace profile` measures real workers, through the same entry point as the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.engines.rollout.config import AUTO_TOKENS
from interlace.forecast.profile.types import Profile
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.recipe.load import load_recipe
from tests.support.training import SMALL, shared_cache


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def profile(*arguments: str) -> "tuple[int, str, str]":
    result = CliRunner().invoke(app, ["profile", *arguments])
    return result.exit_code, result.stdout, result.stderr


def measured(tmp_path: Path, *overrides: str) -> Profile:
    settings = [*SMALL, shared_cache(), "rollout.max_running=16", *overrides]
    code, out, err = profile("quickstart", *settings, "--budget", "1", "--out", "measured.json", "--json")
    assert code == 0, err
    found = Profile.parse(json.loads(out))
    assert Profile.parse(json.loads((tmp_path / "measured.json").read_text())) == found
    assert not list(tmp_path.glob("*.tmp"))
    return found


def check(found: Profile) -> None:
    """What holds on any machine."""
    assert [batch for batch, _ in found.rollout.steps] == [1, 2, 4, 8, 16]
    assert found.rollout.kv_tokens == 8192 and found.rollout.max_running == 16
    assert found.rollout.state_bytes > 0 and found.rollout.device_bytes > 0
    # At this size a call costs more than its tokens, which may drown in it on a busy machine.
    assert found.actor.token_s + found.actor.call_s > 0
    assert found.actor.optimizer_s > 0 and found.actor.export_s > 0
    assert found.actor.state_bytes == pytest.approx(4 * found.rollout.state_bytes, rel=0.1)
    lengths = found.lengths
    assert 1 <= lengths.quantiles[0] <= lengths.median <= lengths.quantiles[-1] <= 32
    assert list(lengths.quantiles) == sorted(lengths.quantiles)
    assert 0 <= found.reward.solve_rate <= 1 and found.reward.fail_share == 0


def test_every_worker_of_a_recipe_is_measured(tmp_path: Path) -> None:
    found = measured(tmp_path)
    check(found)
    assert found.reference is None and found.critic is None
    pairs = {(pair.role, pair.beside) for pair in found.interference}
    beside_controller = {("rollout", "controller"), ("actor", "controller")}
    assert pairs == {("rollout", "rollout"), ("rollout", "actor"), ("actor", "rollout"), *beside_controller}
    split = {(pair.role, pair.beside) for pair in found.interference if pair.call_slowdown is not None}
    assert split == {("rollout", "actor"), ("actor", "rollout"), ("actor", "controller")}
    assert found.source.startswith("interlace profile quickstart ")


def test_the_size_that_an_engine_chooses_for_its_cache_is_measured(tmp_path: Path) -> None:
    found = measured(tmp_path, "rollout.max_tokens=auto", "cluster.devices=cpu:1")
    assert found.actor.state_bytes == pytest.approx(4 * found.rollout.state_bytes, rel=0.1)
    assert found.rollout.kv_tokens < AUTO_TOKENS, "contexts of 16 sequences are less"


def test_a_critic_and_a_reference_where_the_algorithm_has_them(tmp_path: Path) -> None:
    found = measured(tmp_path, "algorithm={name: ppo, kl_coefficient: 0.01}", "cluster.devices=cpu:1")
    check(found)
    assert found.reference is not None and found.reference.token_s + found.reference.call_s > 0
    assert found.critic is not None and found.critic.optimizer_s > 0
    assert {pair.beside for pair in found.interference} == {"controller"}, "no other worker works beside one device"


def test_the_most_probable_tokens_of_a_teacher_are_measured(tmp_path: Path) -> None:
    overrides = ("algorithm={name: distill, signal: top_k}", "reference.model=tiny:micro", "cluster.devices=cpu:1")
    found = measured(tmp_path, *overrides)
    check(found)
    assert found.reference is not None and found.reference.token_s + found.reference.call_s > 0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_workers_of_ray_are_measured_in_their_processes(tmp_path: Path) -> None:
    check(measured(tmp_path, "cluster.backend=ray", "cluster.devices=cpu:1"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["quickstart", "--out", "nowhere/profile.json"], "there is no folder nowhere"),
        (["quickstart", "steps=none"], "steps"),
        (["robot-sac"], "algorithm 'sac' learns from replayed transitions"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(arguments: list[str], sentence: str) -> None:
    code, _, err = profile(*arguments)
    assert code == 2 and sentence in err


def test_the_turns_of_episodes_are_measured_and_simulated(tmp_path: Path) -> None:
    episode = "episode.name=tests.support.worker_episodes:ThreeTurns"
    found = measured(tmp_path, episode, "cluster.devices=cpu:1")
    check(found)
    assert found.turns is not None and set(found.turns.turns) == {3.0}
    assert found.turns.given_tokens[0] == 4 and found.turns.given_tokens[-1] == 4, "the hint, and a token of its own"
    assert found.turns.tool_s[-1] >= 0.01 and 0 <= found.turns.reward <= 1
    settings = [*SMALL, episode, "cluster.devices=cpu:1", "schedule=verl-colocated"]
    predicted = simulate(load_recipe("quickstart", settings), Simulation(profile=found, num_devices=1))
    assert predicted.run.values("rollout/history_reused") and predicted.seconds > 0
