"""On the virtual clock, the placement and granule of simulators determine the duration of a step."""

import pytest

from interlace.core.errors import UserError
from interlace.forecast.costs.scale import shorten_episodes
from interlace.forecast.profile.types import EnvCosts, InferenceCosts, Lengths, Profile, RolloutCosts, TrainCosts, Turns
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.bounds import Workload, estimate_step
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation, simulate
from interlace.forecast.virtual import Simulated
from interlace.run.recipe.load import load_recipe
from interlace.schedule.schedule import Schedule

pytest.importorskip("gymnasium")
PROFILE = Profile(
    device="made up",
    device_memory_bytes=1 << 40,
    rollout=RolloutCosts(steps=((1, 0.125), (8, 1.0)), kv_tokens=10**6),
    actor=TrainCosts(token_s=1e-6),
    critic=TrainCosts(token_s=1e-6),
    reference=InferenceCosts(token_s=0.0),
    env=EnvCosts(chunks=((1, 0.125), (8, 1.0)), host_processes=2),
    turns=Turns(turns=(10.0,), given_tokens=(0.0,), tool_s=(0.0,)),
    lengths=Lengths(prompt_tokens=1, median=1, prompt_sigma=0, response_sigma=0),
)
"""An answer takes an eighth of a second, and so does a chunk; eight together take a second."""
SIZES = ("steps=2", "prompts_per_step=8", "minibatches=1", "episode.env.num_envs=8", "sampling.max_new_tokens=1")


def simulated(*overrides: str) -> Simulated:
    recipe = load_recipe("robot-cartpole", [*SIZES, *overrides])
    return simulate(recipe, Simulation(profile=PROFILE, num_devices=2))


def rollout_s(run: Simulated) -> float:
    """Seconds of a step, but for what training takes."""
    return run.seconds / 2


def test_halves_that_take_turns_hide_the_simulator_behind_the_policy() -> None:
    apart = ("schedule.placement={rollout: 0, env: 1, reference: 1, critic: 1, actor: 1}",)
    lockstep = rollout_s(simulated(*apart, "schedule.granularity.env=100%"))
    halves = rollout_s(simulated(*apart, "schedule.granularity.env=50%"))
    assert lockstep == pytest.approx(20, rel=0.1), "ten answers and ten chunks"
    assert halves == pytest.approx(10.5, rel=0.1), "while one half moves for half a second, the other is answered"


def test_environments_on_the_host_share_its_processes() -> None:
    on_host = simulated("schedule.placement.rollout=0")
    assert 5 <= rollout_s(on_host) <= 11, "80 chunks of an eighth of a second on two processes"
    assert on_host.ledger.seconds["simulate"] == 0
    on_device = simulated("schedule.placement={rollout: 0, env: 1, reference: 1, critic: 1, actor: 1}")
    assert on_device.ledger.seconds["simulate"] > 0
    assert on_device.ledger.total_s == pytest.approx(2 * on_device.seconds, rel=1e-3)


def test_a_profile_without_simulators_serves_no_robot() -> None:
    with pytest.raises(
        UserError, match=r"has simulators, and the profile has no `env`. Measure .* `interlace profile RECIPE --out"
    ):
        recipe = load_recipe("robot-cartpole", SIZES)
        simulate(recipe, Simulation(profile=PROFILE.model_copy(update={"env": None}), num_devices=2))


def test_fewer_and_longer_turns_take_as_long() -> None:
    apart = "schedule.placement={rollout: 0, env: 1, reference: 1, critic: 1, actor: 1}"
    recipe = load_recipe("robot-cartpole", [*SIZES, "steps=1", apart, "schedule.granularity.env=100%"])
    cheap = shorten_episodes(PROFILE, 5)
    assert cheap.turns is not None and cheap.turns.turns == (2.0,)
    whole, short = (
        simulate(recipe, Simulation(profile=profile, num_devices=2)).results[-1].metrics["timing_s/step"]
        for profile in (PROFILE, cheap)
    )
    assert short == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(("devices", "host_s"), [("host", 80 * 0.125 / 2), ("1", 0.0)])
def test_the_lower_bound_counts_simulators_on_the_host(devices: str, host_s: float) -> None:
    workload = Workload(
        num_devices=2, prompts_per_step=8, samples_per_prompt=1, max_new_tokens=1, roles=("rollout", "env", "actor"),
        num_envs=8, turns=10.0,
    )  # fmt: skip
    schedule = Schedule.parse({"placement": {"rollout": "0", "env": devices, "actor": "1"}})
    bound_s = estimate_step(schedule, PROFILE, workload, Simulation(profile=PROFILE, num_devices=2).devices).least_s
    assert bound_s >= max(host_s, 80 * 0.125 / 8)


def test_episodes_that_are_all_trained_have_no_length_shift() -> None:
    profile = PROFILE.model_copy(update={"turns": Turns(turns=(10.0,), given_tokens=(20.0,), tool_s=(0.0,))})
    recipe = load_recipe("robot-cartpole", SIZES)
    place = Workplace(recipe=recipe, simulation=Simulation(profile=profile, num_devices=2))
    oversampling = Schedule.parse({"tail": {"kind": "oversample", "prompts": 1.25, "responses": 1.0}})
    score = place.score(oversampling, Fidelity(steps=1))
    assert isinstance(score, Score), score
    assert score.length_shift == pytest.approx(0, abs=0.05), "observations count, as they do in a sample"
