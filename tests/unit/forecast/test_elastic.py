"""Engines that leave and return, and links for weights and samples, have the expected effect in a simulation."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.core.types import TerminalEvent
from interlace.forecast import virtual
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.elastic import EngineChange, change_engines, parse_changes
from interlace.forecast.links import Link, Links
from interlace.forecast.simulate import Simulation, simulate
from interlace.rollouts.pool import EnginePool
from interlace.run.recipe.config import set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule

SIZES = ["prompts_per_step=8", "samples_per_prompt=4", "sampling.max_new_tokens=4000", "steps=4"]
PROFILE = load_profile("qwen2.5-7b-h800")


def run(preset: str, *changes: EngineChange, links: Links | None = None, devices: int = 8):  # type: ignore[no-untyped-def]
    simulation = Simulation(
        profile=PROFILE.model_copy(update={"links": links}), num_devices=devices, num_prompts=64, engine_changes=changes
    )
    return simulate(set_schedule(load_recipe("longtail", SIZES), load_schedule(preset)), simulation)


@pytest.mark.parametrize("preset", ["rlinf-disaggregated", "areal", "verl-colocated", "pipelinerl", "dora"])
def test_a_run_goes_on_without_the_engines_that_left(preset: str) -> None:
    alone = run(preset)
    left = [EngineChange(at_s=20.0, engine=engine, joins=False) for engine in (0, 1)]
    back = EngineChange(at_s=0.5 * alone.seconds, engine=1, joins=True)
    fewer = run(preset, *left, back)
    assert len(fewer.results) == 4
    trained = [sum(ended.event == TerminalEvent.TRAINED for ended in each.events) for each in (alone, fewer)]
    assert trained[0] == trained[1] == 4 * 32
    assert fewer.results[0].metrics["rollout/num_migrated"] > 0


def test_an_engine_that_left_serves_nothing_until_it_is_back(tmp_path: Path) -> None:
    changes = (EngineChange(at_s=20.0, engine=0, joins=False), EngineChange(at_s=50.0, engine=0, joins=True))
    simulation = Simulation(profile=PROFILE, num_devices=8, num_prompts=64, engine_changes=changes)
    recipe = set_schedule(load_recipe("longtail", SIZES), load_schedule("rlinf-disaggregated"))
    simulate(recipe, simulation, timeline=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    begun = [
        event["ts"] / 1e6
        for event in events
        if event.get("name") == "rollout.serve" and tracks.get((event["pid"], event["tid"])) == "rollout/0 rank 0"
    ]
    assert any(at_s < 20 for at_s in begun) and any(at_s >= 50 for at_s in begun)
    assert not [at_s for at_s in begun if 20.1 < at_s < 50]


def test_an_engine_that_left_is_not_taken_for_one_that_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[EnginePool] = []

    async def change(pool: EnginePool, changes: Sequence[EngineChange]) -> None:
        pools.append(pool)
        await change_engines(pool, changes)

    monkeypatch.setattr(virtual, "change_engines", change)
    run("rlinf-disaggregated", *[EngineChange(at_s=20.0, engine=engine, joins=False) for engine in (0, 1)])
    [pool] = pools
    assert pool.weights.pending.num == sum(driver.weights.pending_version is not None for driver in pool.drivers) == 2


def test_the_last_engine_does_not_leave_and_unknown_ones_are_named() -> None:
    leaves = [EngineChange(at_s=1.0, engine=engine, joins=False) for engine in range(4)]
    with pytest.raises(UserError, match="engine 3 is the last one"):
        run("rlinf-disaggregated", *leaves)
    with pytest.raises(UserError, match="no engine 9"):
        run("rlinf-disaggregated", EngineChange(at_s=1.0, engine=9, joins=False))


def test_changes_are_read_from_a_line() -> None:
    assert parse_changes("600:-3, 60:+1") == (
        EngineChange(at_s=60.0, engine=1, joins=True),
        EngineChange(at_s=600.0, engine=3, joins=False),
    )
    with pytest.raises(UserError, match="is no change"):
        parse_changes("600:3")


FAST = Link(bytes_per_s=400e9)
SLOW = Link(bytes_per_s=1e9, latency_s=0.5)


def test_weights_pass_links_to_engines_on_other_devices_only() -> None:
    links = Links(devices_per_node=4, in_node=FAST, between_nodes=SLOW)
    assert links.weights_s(2e9, ["sim:0"], ["sim:0", "sim:1"]) == 0.0
    assert links.weights_s(2e9, ["sim:0"], ["sim:1"]) == pytest.approx(2e9 / 400e9)
    assert links.weights_s(2e9, ["sim:0"], ["sim:4", "sim:5"]) == pytest.approx(0.5 + 1.0)
    apart = links.model_copy(update={"between_sites": Link(bytes_per_s=0.5e9, latency_s=1.0)})
    assert apart.weights_s(2e9, ["a:0"], ["b:0"]) == pytest.approx(1.0 + 4.0 + 0.5 + 2.0)
    assert apart.samples_s(["a:0"], ["b:0", "b:1"]) == (1.0, 16 / 0.5e9)


def test_a_slow_link_makes_publications_long_where_roles_are_apart() -> None:
    links = Links(devices_per_node=4, in_node=FAST, between_nodes=SLOW)
    apart_s = run("rlinf-disaggregated", links=links).seconds - run("rlinf-disaggregated").seconds
    num_publications = 5  # the first weights, and those of each step
    assert apart_s == pytest.approx(num_publications * (PROFILE.rollout.state_bytes / 1e9 + 0.5), rel=0.15)
    assert run("verl-colocated", links=links).seconds == pytest.approx(run("verl-colocated").seconds)
