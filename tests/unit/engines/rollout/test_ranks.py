"""An engine of two ranks that share its layers gives the same results as an engine of one."""

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from interlace.core.types import Response, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train.config import MeshShape
from interlace.engines.train.ranks import Ranks
from interlace.runtime.local.cluster import LocalCluster
from interlace.runtime.worker import Worker, WorkerContext, WorkerSpec, operation
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from interlace.weights.plan import Shard
from tests.unit.engines.rollout.conftest import tiny_model
from tests.unit.engines.train.models import tiny_model as model_of_kind

PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(3, 60, 4 + 5 * seed)] for seed in range(5)]
PARAMS = SamplingParams(max_new_tokens=24, stop_token_ids=(2,))


def make_engine(kind: str, mesh: object = None) -> NativeEngine:
    model = model_of_kind(kind) if kind else tiny_model()
    config = NativeConfig(max_running=4, max_tokens=512, tensor_parallel_size=2 if mesh else 1)
    return NativeEngine(model, config=config, seed=3, mesh=mesh)  # type: ignore[arg-type]


class RankWorker(Worker):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        assert context.rendezvous is not None
        ranks = Ranks.join(
            context.rendezvous.url,
            context.rendezvous.secret,
            rank=context.rank,
            shape=MeshShape(tensor=2),
            device="cpu",
        )
        self._mesh = ranks.tensor_mesh
        self._engine: NativeEngine

    @operation(bin="idle")
    def start(self, kind: str) -> None:
        self._engine = make_engine(kind, self._mesh)

    @operation(bin="generate", collect="all")
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Response]:
        return self._engine.generate(prompts, params)

    @operation(on_device=False, collect="all")
    def shards(self) -> tuple[Shard, ...]:
        return self._engine.weight_shards

    @operation(bin="weight_sync")
    def scale(self, factor: float, frozen: bool) -> None:
        """Takes in weights that are the first ones scaled, as a reader brings them: this rank's part of each."""
        whole = tiny_model().state_dict()
        parts = {shard.name: whole[shard.name][shard.box.slices] * factor for shard in self._engine.weight_shards}
        self._engine.update_weights(parts, 1, "recompute", frozen=frozen)


class Pair:
    def __init__(self, loop: asyncio.AbstractEventLoop, group: object) -> None:
        self._loop, self._group = loop, group

    def call(self, method: str, *args: object) -> object:
        async def on_ranks() -> object:
            return await getattr(self._group, method)(*args)

        return self._loop.run_until_complete(on_ranks())


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with asyncio.Runner() as runner:
        devices = [Device(index=i, pool="cpu", pool_index=i, memory_bytes=1 << 30) for i in range(2)]

        async def launch() -> tuple[LocalCluster, object]:
            cluster = LocalCluster(devices, Schedule(), hang_after_s=300)
            spec = WorkerSpec(
                name="rollout",
                factory=RankWorker,
                worker_class=RankWorker,
                devices=tuple(devices),
                num_ranks=2,
                preload=("tests.support.rank_pair",),
            )
            return cluster, await cluster.launch(spec)

        cluster, group = runner.run(launch())
        try:
            yield Pair(runner.get_loop(), group)
        finally:
            runner.run(cluster.shutdown())


def assert_same(found: object, expected: Sequence[Response]) -> None:
    first, second = found  # type: ignore[misc]
    assert [one.token_ids for one in first] == [one.token_ids for one in second], "ranks drew other tokens"
    for ours, theirs in zip(first, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", ["", "llama", "mixtral"])
def test_two_ranks_draw_what_one_draws(pair: Pair, kind: str) -> None:
    pair.call("start", kind)
    assert_same(pair.call("generate", PROMPTS, PARAMS), make_engine(kind).generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("frozen", [False, True], ids=["copied", "served from where it lies"])
def test_each_rank_takes_its_part_of_an_update(pair: Pair, frozen: bool) -> None:
    alone = make_engine("")
    alone.update_weights({name: tensor * 0.9 for name, tensor in tiny_model().state_dict().items()}, 1, "recompute")
    pair.call("start", "")
    pair.call("scale", 0.9, frozen)
    assert_same(pair.call("generate", PROMPTS, PARAMS), alone.generate(PROMPTS, PARAMS))
    ours, theirs = pair.call("shards")  # type: ignore[misc]
    shared = [one.name for one, other in zip(ours, theirs, strict=True) if one.box != other.box]
    whole = {name: tensor for name, tensor in tiny_model().state_dict().items() if name in shared}
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= set(shared)
    for name, tensor in whole.items():
        parts = [next(each for each in its if each.name == name).box for its in (ours, theirs)]
        assert sum(int(np.prod(box.size)) for box in parts) == tensor.numel()
