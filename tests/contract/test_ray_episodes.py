"""Episodes in processes that Ray placed behave as on one machine."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from interlace.core.types import SampleKey
from interlace.rollouts.episode_process import MakeEpisode
from interlace.rollouts.episode_workers import WorkerEpisodes
from interlace.runtime.cluster import Cluster
from tests.support.episode_runs import PARAMS, samples_of
from tests.support.worker_episodes import ThreeTurns, make_misbehaving, make_three_turns
from tests.unit.rollouts.test_episode_workers import shown

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_session")]


def on_ray(make: MakeEpisode, made: list[WorkerEpisodes]) -> Callable[[Cluster], WorkerEpisodes]:
    def create(cluster: Cluster) -> WorkerEpisodes:
        assert cluster.place_child is not None
        made.append(WorkerEpisodes(make, PARAMS, 2, place=cluster.place_child))
        cluster.at_end(made[-1].close)
        return made[-1]

    return create


def test_samples_are_the_same_to_the_bit_in_processes_of_ray() -> None:
    here = samples_of(ThreeTurns(), {})
    there = samples_of(on_ray(make_three_turns, []), {}, backend="ray")
    assert [shown(sample) for sample in here] == [shown(sample) for sample in there] and len(here) == 6
    assert {each.outcome.parts["pid"] for each in here if each.outcome}.isdisjoint(
        each.outcome.parts["pid"] for each in there if each.outcome
    )


def test_the_samples_of_a_process_that_died_begin_again(tmp_path: Path) -> None:
    failures: dict[SampleKey, str] = {}
    made: list[WorkerEpisodes] = []
    make = partial(make_misbehaving, "die once", str(tmp_path), 60.0)
    samples = samples_of(on_ray(make, made), failures, backend="ray")
    assert not failures and made[0].num_lost == 1 and len(samples) == 6
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
