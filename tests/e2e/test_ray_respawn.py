"""Ranks on Ray that are killed are replaced while the run continues, and change nothing of it."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from interlace.core import payload
from interlace.core.errors import RestartBudgetError
from interlace.core.payload import StoredSegments
from interlace.core.types import Metrics, Response
from interlace.engines.rollout.services.process import find_guards
from interlace.observe.headline import REWARD, Headline
from interlace.observe.progress import QuietProgress
from interlace.rollouts.generate import GenerateStage
from interlace.run import launch
from interlace.run.make_engines import EngineSource, make_rollout_engine
from interlace.runtime.worker import Worker, WorkerContext
from interlace.workers.rollout import RolloutBundle
from tests.support.robots import SMALL as ROBOT
from tests.support.training import equal_weights, final_weights, metrics, run, run_recipe, samples

pytestmark = [pytest.mark.slow, pytest.mark.ray]
SETTINGS = (
    "steps=6",
    "warmup=null",
    "evaluation.num_prompts=1",
    "cluster.devices=cpu:1",
    "reward.workers=0",
    "algorithm.kl_coefficient=0.1",
    "optimizer.lr=1e-3",
)
ON_RAY = (*SETTINGS, "cluster.backend=ray")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The newest process of each rank, by the rank's name."""
    from interlace.runtime.ray.rank import RayRank

    found: dict[str, int] = {}
    start = RayRank.start

    async def started(self: RayRank, factory: Callable[[WorkerContext], Worker], within_s: float) -> None:
        await start(self, factory, within_s)
        found[self.name] = int(self._where.split()[1])

    monkeypatch.setattr(RayRank, "start", started)
    return found


class KillAfterSteps(QuietProgress):
    """Kills a rank after each of some steps."""

    def __init__(self, ranks: dict[int, tuple[str, float]], processes: dict[str, int]) -> None:
        """ranks: by step, the name of a rank and the seconds from the end of the step to its death."""
        self._ranks, self._processes = dict(ranks), processes
        self.killed: list[int] = []
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, metrics: Metrics, headline: Headline = REWARD) -> None:
        if step not in self._ranks:
            return
        name, delay_s = self._ranks.pop(step)
        self.killed.append(self._processes[name])
        if delay_s:
            threading.Timer(delay_s, os.kill, (self.killed[-1], signal.SIGKILL)).start()
        else:
            os.kill(self.killed[-1], signal.SIGKILL)


def test_killed_ranks_are_replaced_and_the_weights_are_those_of_a_run_without_kills(
    tmp_path: Path, processes: dict[str, int]
) -> None:
    run(tmp_path, "whole", SETTINGS)
    ranks = {
        1: ("rollout/0[rank 0]", 0.0),
        2: ("reward[rank 0]", 0.0),
        3: ("reference/0[rank 0]", 0.0),
        4: ("rollout/0[rank 0]", 0.05),
    }
    notes = KillAfterSteps(ranks, processes)
    report = run(tmp_path, "killed", ON_RAY, progress=notes)
    assert report.done_steps == 6
    assert len(set(notes.killed)) == 4
    for name in ("rollout/0", "reward", "reference/0"):
        assert f"{name} runs again" in notes.said
    assert not any("from its newest checkpoint" in text for text in notes.said)
    assert samples(tmp_path, "killed") == samples(tmp_path, "whole")
    assert metrics(tmp_path, "killed") == metrics(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path, "killed"), final_weights(tmp_path, "whole"))


def test_a_new_engine_reads_a_delta_and_the_version_that_it_is_applied_to(
    tmp_path: Path, processes: dict[str, int]
) -> None:
    pytest.importorskip("peft")
    # Without an adapter, a step of this size changes too many weights for a delta.
    deltas = ("actor.lora={rank: 2, target_modules: [q_proj]}", "weights.codec=delta")
    run(tmp_path, "whole", [*SETTINGS, *deltas])
    notes = KillAfterSteps({2: ("rollout/0[rank 0]", 0.0), 4: ("rollout/0[rank 0]", 0.05)}, processes)
    run(tmp_path, "killed", [*ON_RAY, *deltas], progress=notes)
    assert len(set(notes.killed)) == 2 and "rollout/0 runs again" in notes.said
    assert not any("from its newest checkpoint" in text for text in notes.said)
    assert samples(tmp_path, "killed") == samples(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path, "killed"), final_weights(tmp_path, "whole"))


def make_rollout(source: EngineSource, context: WorkerContext) -> RolloutBundle:
    payload.MIN_BYTES = 0  # in the rank's process: the responses of this test are short
    return make_rollout_engine(source, context)


def test_contents_that_are_deleted_or_lost_with_their_rank_are_drawn_again(
    tmp_path: Path, processes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take, stored = GenerateStage._take_response, list[Path]()

    def lose(stage: GenerateStage, response: Response) -> None:
        segments = response.segments
        assert isinstance(segments, StoredSegments)
        path = Path(segments.content._path)
        stored.append(path)
        if len(stored) == 5:
            path.unlink()
        if len(stored) == 40:
            process = processes["rollout/0[rank 0]"]
            os.kill(process, signal.SIGKILL)
            files = list(path.parent.glob(f"payload-{process}-*"))
            assert path in files
            for file in files:  # as with the memory of a machine that is gone
                file.unlink()
        take(stage, response)

    run(tmp_path, "whole", SETTINGS)
    monkeypatch.setattr(GenerateStage, "_take_response", lose)
    monkeypatch.setattr(launch, "make_rollout_engine", make_rollout)
    notes = KillAfterSteps({}, processes)
    report = run(tmp_path, "lost", ON_RAY, progress=notes)
    assert report.done_steps == 6 and len(stored) > 6 * 16
    assert "rollout/0 runs again" in notes.said
    assert not any("from its newest checkpoint" in text for text in notes.said)
    rows = metrics(tmp_path, "lost")
    assert sum(row.pop("redrawn/resource", 0) for row in rows) == len(stored) - 6 * 16 >= 2
    assert rows == metrics(tmp_path, "whole")
    assert samples(tmp_path, "lost") == samples(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path, "lost"), final_weights(tmp_path, "whole"))
    assert not any(path.exists() for path in stored)


def test_an_exhausted_budget_ends_the_run_with_its_state_saved(tmp_path: Path, processes: dict[str, int]) -> None:
    notes = KillAfterSteps({2: ("reference/0[rank 0]", 0.0)}, processes)
    with pytest.raises(RestartBudgetError, match=r"recovery\.restarts_per_hour\.reference is 0"):
        run(tmp_path, "ended", [*ON_RAY, "recovery.restarts_per_hour={reference: 0}"], progress=notes)
    assert [path.name for path in (tmp_path / "ended" / "checkpoints").glob("step_*")] == ["step_2"]


def test_a_killed_rank_of_simulators_is_replaced_and_its_episodes_continue(
    tmp_path: Path, processes: dict[str, int]
) -> None:
    pytest.importorskip("gymnasium")
    settings = (*ROBOT, "steps=4", "cluster.devices=cpu:1")
    run_recipe("robot-cartpole", tmp_path, "whole", settings)
    notes = KillAfterSteps({1: ("env/0[rank 0]", 0.0), 2: ("env/0[rank 0]", 0.1)}, processes)
    on_ray = (*settings, "cluster.backend=ray")
    report = run_recipe("robot-cartpole", tmp_path, "killed", on_ray, progress=notes)
    assert report.done_steps == 4
    assert len(set(notes.killed)) == 2 and notes.said.count("env/0 runs again") == 2
    assert not any("from its newest checkpoint" in text for text in notes.said)
    assert samples(tmp_path, "killed") == samples(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path, "killed"), final_weights(tmp_path, "whole"))
    names = ("env/resets", "env/actions", "env/broken")
    found = [[row[name] for row in metrics(tmp_path, run) for name in names] for run in ("killed", "whole")]
    assert found[0] == found[1]


def test_a_rank_of_a_resumed_run_is_replaced_after_the_checkpoint_of_its_start_was_deleted(
    tmp_path: Path, processes: dict[str, int]
) -> None:
    kept = (*ON_RAY, "checkpoint_every=1", "keep_checkpoints=1")
    run(tmp_path, "resumed", [*kept, "steps=1"])
    notes = KillAfterSteps({4: ("rollout/0[rank 0]", 0.0)}, processes)
    report = run(tmp_path, "resumed", kept, resume=True, progress=notes)
    assert report.done_steps == 6 and "rollout/0 runs again" in notes.said


class ListGuards(KillAfterSteps):
    """Also lists the guards of the run's servers after each step."""

    def __init__(self, engines: Path, ranks: dict[int, tuple[str, float]], processes: dict[str, int]) -> None:
        super().__init__(ranks, processes)
        self._engines, self.guards = engines, list[set[int]]()

    def step(self, step: int, metrics: Metrics, headline: Headline = REWARD) -> None:
        self.guards.append({*find_guards(self._engines)})
        super().step(step, metrics, headline)


def test_a_rank_in_place_of_a_killed_one_adopts_its_server(tmp_path: Path, processes: dict[str, int]) -> None:
    settings = ("rollout=interlace", "steps=4", "algorithm.kl_coefficient=0")
    notes = ListGuards(tmp_path / "killed" / "engines", {2: ("rollout/0[rank 0]", 0.0)}, processes)
    run(tmp_path, "killed", [*ON_RAY, *settings], progress=notes)
    assert "rollout/0 runs again" in notes.said
    assert len(notes.guards) == 4 and len(notes.guards[0]) == 1 and len(set(map(frozenset, notes.guards))) == 1
    assert not find_guards(tmp_path / "killed" / "engines")
    run(tmp_path, "whole", [*SETTINGS, *settings[1:]])
    assert samples(tmp_path, "killed") == samples(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path, "killed"), final_weights(tmp_path, "whole"))
