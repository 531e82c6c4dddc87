"""With process ranks, the content of samples passes the controller as references, and the samples are the same."""

import gc
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interlace.core import payload
from interlace.core.errors import WorkerDiedError
from interlace.core.payload import StoredSegments
from interlace.core.types import Prompt, Sample, SampleKey
from interlace.rollouts.base import Episode, Session
from interlace.rollouts.episodes.single_turn import SingleTurn
from interlace.rollouts.pool import EnginePool
from interlace.runtime.channel import Channel
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import WorkerContext, WorkerSpec, operation
from interlace.schedule.schedule import Schedule
from interlace.workers.rollout import RolloutWorker
from tests.contract.clusters import CLUSTERS, WITH_TORCH
from tests.contract.payload_workers import Camera, Learner, Picture, Reader
from tests.support.episode_runs import OneEngine

KINDS = ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
ENGINE = OneEngine()


class ApartRollout(RolloutWorker):
    @operation(on_device=False)
    def process(self) -> int:
        return os.getpid()


class TwoTurns:
    """Episode whose second turn continues the first after two inserted tokens."""

    async def run(self, prompt: Prompt, session: Session) -> None:
        first = await session.generate(prompt.token_ids.tolist())
        await session.generate([*prompt.token_ids.tolist(), *first.token_ids.tolist(), 5, 6])


def make_rollout(context: WorkerContext) -> RolloutWorker:
    payload.MIN_BYTES = 0  # in the rank's process: the responses of this test are short
    return ApartRollout(context, ENGINE._bundle)


@dataclass(frozen=True, kw_only=True)
class Apart(OneEngine):
    """The engine in a process, also on the local cluster."""

    async def pool(self, cluster: Cluster, num_samples: int) -> EnginePool:
        spec = WorkerSpec(
            name="rollout/0", factory=make_rollout, worker_class=ApartRollout, devices=cluster.devices[:1],
            preload=WITH_TORCH, may_die=True,
        )  # fmt: skip
        group = await cluster.launch(spec)
        pool = EnginePool(
            cluster, [group], self.schedule, samples_per_step=num_samples, expected_tokens=12, on_suspended=lambda: None
        )
        pool.start()
        return pool


def wave() -> list[Sample]:
    prompts = [
        Prompt(uid=f"p{gid}", token_ids=np.arange(3, 9 + gid, dtype=np.int32), text="", answer="") for gid in range(3)
    ]
    return [Sample(key=SampleKey(gid, index), prompt=prompts[gid]) for gid in range(3) for index in range(2)]


def run(kind: str, request: pytest.FixtureRequest, body: Any) -> Any:
    if kind == "ray":
        request.getfixturevalue("ray_session")
    return CLUSTERS[kind](body, Schedule(), 1 << 30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("episode", [SingleTurn(), TwoTurns()], ids=["one turn", "two turns"])
def test_contents_stay_in_shared_memory(
    kind: str, episode: Episode, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "MIN_BYTES", 0)  # the controller stores the episodes of two turns

    async def here(cluster: Cluster) -> dict[SampleKey, tuple[bytes, bytes, str]]:
        rows, _ = await ENGINE.play(await ENGINE.pool(cluster, 6), cluster, episode, wave())
        assert all(type(row.segments) is tuple for row in rows), "a thread of the run has nothing to keep back"
        return {row.key: (row.token_ids.tobytes(), row.logprobs.tobytes(), row.text) for row in rows}

    async def apart(cluster: Cluster) -> dict[SampleKey, tuple[bytes, bytes, str]]:
        readers = await cluster.launch(
            WorkerSpec(
                name="reader", factory=Reader, worker_class=Reader, devices=cluster.devices[:2], num_ranks=2,
                preload=WITH_TORCH, may_die=True,
            )
        )  # fmt: skip
        engine = Apart()
        pool = await engine.pool(cluster, 6)
        rows, _ = await engine.play(pool, cluster, episode, wave())
        folder = cluster._folder  # type: ignore[attr-defined]
        files = lambda: [*Path(folder.path).glob("payload-*")]  # noqa: E731
        assert all(isinstance(row.segments, StoredSegments) for row in rows) and len(files()) == 6
        os.kill(await pool.drivers[0].group.process(), signal.SIGKILL)  # type: ignore[attr-defined]
        read = await readers.read(rows)
        assert len({pid for pid, *_ in read}) == 2
        found = {row.key: (ids, logprobs, text) for row, (_, ids, logprobs, text) in zip(rows, read, strict=True)}
        del rows[0]
        gc.collect()
        assert len(files()) == 5
        rows.clear()
        gc.collect()
        assert not files()
        return found

    assert run(kind, request, apart) == run("local", request, here)


@pytest.mark.parametrize("kind", [*KINDS, "sim"])
def test_values_that_a_worker_keeps_are_read_where_they_are_used(kind: str, request: pytest.FixtureRequest) -> None:
    async def body(cluster: Cluster) -> None:
        camera = await cluster.start("camera", Camera, on="0", may_die=kind != "sim")
        ranks = 1 if kind == "sim" else 2
        learner = await cluster.launch(
            WorkerSpec(
                name="learner", factory=Learner, worker_class=Learner, devices=cluster.devices[:ranks],
                num_ranks=ranks, preload=WITH_TORCH,
            )
        )  # fmt: skip
        channel = Channel[int, Picture]("pictures", Picture, cluster.waits)
        cursor = channel.subscribe("learner", ("content",))
        for number in range(4):
            channel.open(number, await camera.take(number), ("key", "content"))
        channel.close()
        if kind != "sim":
            os.kill(await camera.process(), signal.SIGKILL)  # its pictures outlive it
            with pytest.raises(WorkerDiedError, match="camera"):
                await camera.take(5)
        # A batch by size: each picture counts as its number of bytes, and two fit.
        sizes = []
        while rows := cursor.lease(max_weight=2 * 64 * 64 * 4, weight=lambda _: 64 * 64 * 4):
            assert await learner.learn(rows) == [row.key for row in rows]
            cursor.acknowledge([row.key for row in rows])
            sizes.append(len(rows))
        assert sizes == [2, 2]

    run(kind, request, body)


@pytest.mark.parametrize("kind", KINDS)
def test_contents_that_no_reply_has_named_are_removed_when_their_rank_dies(
    kind: str, request: pytest.FixtureRequest
) -> None:
    async def body(cluster: Cluster) -> None:
        camera = await cluster.start("camera", Camera, on="0", may_die=True)
        learner = await cluster.start("learner", Learner, on="0", may_die=True)
        folder = Path(cluster._folder.path)  # type: ignore[attr-defined]
        files = lambda: len([*folder.glob("payload-*")])  # noqa: E731
        kept = await camera.take(3)
        await camera.take(4)
        await camera.process()
        gc.collect()
        assert files() == 1, "nothing refers to the reply before the last one"
        with pytest.raises(WorkerDiedError, match="camera"):
            await camera.take_and_die()
        assert files() == 1
        assert await learner.learn([kept]) == [3]
        del kept
        gc.collect()
        assert not files()

    run(kind, request, body)
