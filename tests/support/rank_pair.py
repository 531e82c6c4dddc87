"""Ranks of a train engine, reused for many examples because starting processes that load torch takes seconds."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from interlace.algorithms import create_algorithm
from interlace.core.training import Aggregation, UpdateConfig
from interlace.core.types import FloatArray, Metrics, Sample
from interlace.engines.train import ActorConfig, Adapter, LoraConfig, OptimizerConfig, TrainConfig, TrainEngine
from interlace.engines.train.config import MeshShape
from interlace.engines.train.engine import Aggregator
from interlace.engines.train.ranks import Ranks, whole_tensor
from interlace.models import tensor_parallel
from interlace.runtime.group import WorkerGroup
from interlace.runtime.local.cluster import LocalCluster
from interlace.runtime.worker import Worker, WorkerContext, WorkerSpec, operation
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from interlace.weights.saved import PartReader, SavedWeights, trace_load
from interlace.weights.shards import local_part
from tests.support.listening import listening_addresses
from tests.support.relocation import poisoned
from tests.unit.engines.train.models import tiny_model


@dataclass(frozen=True)
class Setting:
    """An engine to train. Its initial weights are always the same."""

    aggregation: Aggregation = "token_mean"
    budget: int = 10_000
    kind: str = "qwen2"
    skip_ratio: float | None = None
    gradient_checkpointing: bool = False
    max_grad_norm: float | None = None
    lora_rank: int | None = None
    reshard: bool = True
    lr: float = 1e-2
    eps: float = 1e-8
    tensor: int = 1
    context: int = 1
    expert: int = 1
    replicate: int = 1
    num_ids: int | None = None
    tied: bool = False
    key_value_heads: int = 2
    in_parts: bool = False
    """True if each rank reads only its part of the folder."""
    hides_activations: bool = False
    """True to inject a plan of layers that leaves out the parameters of activations."""
    is_local_denominator: bool = False
    """True to inject a common mistake: each rank divides by its own denominator, and the ranks are averaged."""

    @property
    def actor(self) -> ActorConfig:
        return ActorConfig(
            gradient_checkpointing=self.gradient_checkpointing,
            reshard=self.reshard,
            tensor_parallel=self.tensor,
            context_parallel=self.context,
            expert_parallel=self.expert,
            replicate=self.replicate,
        )


@dataclass(frozen=True)
class Update:
    """Result of one minibatch."""

    metrics: Metrics
    gradient: tuple[torch.Tensor, ...]
    """Full gradient of the minibatch's loss, by parameter."""
    weights: dict[str, torch.Tensor]
    """Weights after the update."""


def make_engine(setting: Setting, ranks: Ranks, folder: Path | None = None) -> TrainEngine:
    """Makes an engine. folder: a checkpoint to resume from."""
    algorithm = create_algorithm("grpo", {"kl_coefficient": 0.1, "entropy_coefficient": 0.01})
    if folder and setting.in_parts:
        saved = SavedWeights(folder)
        config = AutoConfig.from_pretrained(folder)
        model, landings = trace_load(type(tiny_model(setting.kind)), config, saved, torch.float32)
        ranks.fill = PartReader(saved, landings).fill
    else:
        own = tiny_model(setting.kind, tie_word_embeddings=setting.tied, num_key_value_heads=setting.key_value_heads)
        model = AutoModelForCausalLM.from_pretrained(folder) if folder else own
    adapter = Adapter(model, LoraConfig(rank=setting.lora_rank), seed=0) if setting.lora_rank else None
    engine = TrainEngine(
        model,
        loss=algorithm.loss,
        optimizer=OptimizerConfig(lr=setting.lr, eps=setting.eps, max_grad_norm=setting.max_grad_norm),
        config=TrainConfig(
            actor=setting.actor,
            update=UpdateConfig(
                aggregation=setting.aggregation, aggregation_length=32, skip_minibatch_ratio=setting.skip_ratio
            ),
            tokens_per_microbatch=setting.budget,
            temperature=0.9,
            num_ids=setting.num_ids,
        ),
        ranks=ranks,
        adapter=adapter,
    )
    if folder and not setting.in_parts:
        engine.load_optimizer(folder)
    return engine


def update(engine: TrainEngine) -> Update:
    """Ends the minibatch with an optimizer step."""
    taken: list[torch.Tensor] = []
    step = engine.optimizer.step

    def record(denominator: float, norm: float) -> None:
        taken.extend(whole_tensor(p.grad) / denominator for p in engine.model.parameters() if p.grad is not None)
        step(denominator, norm)

    engine.optimizer.step = record  # type: ignore[method-assign]
    metrics = engine.optimizer_step()
    weights = {name: tensor.clone() for name, tensor in engine.weights().items()}
    return Update(metrics, tuple(tensor.detach() for tensor in taken), weights)


class LocalAggregator(Aggregator):
    """Aggregator that divides each micro-batch by its own denominator."""

    def weights(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        weights_T = super().weights(lengths, device)
        weights_T = torch.ones(sum(lengths)) if weights_T is None else weights_T
        return weights_T / super().denominator(lengths)

    def denominator(self, lengths: Sequence[int]) -> float:
        return 1.0


class EngineWorker(Worker):
    """Makes engines, and trains them as an actor does."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        torch.set_num_threads(1)
        place = context.rendezvous
        assert place is not None
        shape = MeshShape(shard=context.num_ranks)
        Ranks.join(place.url, place.secret, rank=context.rank, shape=shape, device="cpu")
        self._engine: TrainEngine

    @operation(bin="idle")
    def start(self, setting: Setting, folder: Path | None = None) -> None:
        ranks = Ranks.over(self.context.rank, setting.actor.mesh_shape(self.context.num_ranks))
        tensor_parallel.ACTIVATION = "" if setting.hides_activations else "act_fn"
        self._engine = make_engine(setting, ranks, folder)
        if setting.is_local_denominator:
            own = self._engine._aggregator
            self._engine._aggregator = LocalAggregator(
                aggregation=own.aggregation, aggregation_length=own.aggregation_length
            )

    @operation(bin="idle", collect="all")
    def listens_on(self) -> set[str]:
        return listening_addresses(os.getpid())

    @operation(bin="train", split="samples")
    def accumulate(self, samples: Sequence[Sample]) -> None:
        self._engine.accumulate(samples)

    @operation(bin="train")
    def accumulate_parts(self, parts: Sequence[Sequence[Sample]]) -> None:
        """Accumulates one list of samples per rank, without distribution."""
        self._engine.accumulate(parts[self.context.rank])

    @operation(bin="train")
    def update(self) -> Update:
        return update(self._engine)

    @operation(bin="switch")
    def relocate(self) -> None:
        self._engine.relocate(poisoned)

    @operation(bin="idle")
    def save(self, folder: Path) -> None:
        self._engine.copy_to_host(None).write(folder)

    @operation(bin="inference", split="samples", collect="concat")
    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        return self._engine.logprobs(samples)

    @operation(bin="inference", split="samples", collect="concat")
    def base_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        return self._engine.base_logprobs(samples)

    @operation(on_device=False, collect="all")
    def resident_bytes(self) -> tuple[int, int]:
        """Returns the bytes of (parameters, optimizer moments) on this rank."""
        parameters = (local_part(parameter) for parameter in self._engine.model.parameters())
        moments = (local_part(tensor) for tensor in self._engine.optimizer.tensors() if tensor.ndim)
        return sum(t.nbytes for t in parameters), sum(t.nbytes for t in moments)


class RankPair:
    """The group with a synchronous interface, for tests without an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, group: WorkerGroup[Any]) -> None:
        self._loop, self._group = loop, group

    def start(self, setting: Setting, folder: Path | None = None) -> None:
        """Makes new engines. Samples are then distributed for the setting's layout."""
        self._group.rank_set._copies = setting.tensor * setting.context
        self._call("start", setting, folder)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self._call(method, *args)

    def _call(self, method: str, *args: Any) -> Any:
        async def on_ranks() -> Any:
            return await getattr(self._group, method)(*args)

        return self._loop.run_until_complete(on_ranks())


@contextmanager
def rank_pair(num_ranks: int = 2) -> Iterator[RankPair]:
    with asyncio.Runner() as runner:
        devices = [Device(index=i, pool="cpu", pool_index=i, memory_bytes=1 << 30) for i in range(num_ranks)]

        async def launch() -> tuple[LocalCluster, WorkerGroup[Any]]:
            cluster = LocalCluster(devices, Schedule(), hang_after_s=300)
            spec = WorkerSpec(
                name="actor",
                factory=EngineWorker,
                worker_class=EngineWorker,
                devices=tuple(devices),
                num_ranks=num_ranks,
                preload=(__name__,),
            )
            return cluster, await cluster.launch(spec)

        cluster, group = runner.run(launch())
        try:
            yield RankPair(runner.get_loop(), group)
        finally:
            runner.run(cluster.shutdown())
