"""Shares one engine between the sessions of a server and runs that use the server as a rollout engine."""

from typing import TYPE_CHECKING

from interlace.engines.rollout.config import NativeConfig, ServedConfig
from interlace.engines.rollout.protocol import RolloutEngine
from interlace.run.recipe.config import Recipe
from interlace.runtime.cluster import Cluster
from interlace.runtime.local.cluster import LocalCluster

if TYPE_CHECKING:
    from aiohttp import web

    from interlace.engines.rollout.services.hosted import HostedEngine

FOREVER_S = 1e9
"""Timeout in seconds that is never reached: an engine of this process cannot be lost."""


class SharedEngine:
    """Makes the native engine of a server available at interlace's engine routes."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.hosted: HostedEngine | None = None

    def is_possible(self, cluster: Cluster) -> bool:
        """Returns whether the server has exactly one native engine, in this process, of a model that reads tokens."""
        from interlace.models.inputs import input_embedding
        from interlace.models.loading import empty_model

        rollout = self._recipe.rollout
        is_native = isinstance(rollout, NativeConfig) and rollout.tensor_parallel_size == 1
        is_one = isinstance(cluster, LocalCluster) and len(cluster.place("rollout")) == 1
        return is_native and is_one and input_embedding(empty_model(self._recipe.model).config) is None

    def wrap(self, engine: RolloutEngine, recipe: Recipe) -> RolloutEngine:
        """Returns an engine for the sessions that shares the given engine with the routes."""
        from interlace.engines.rollout.engine import NativeEngine
        from interlace.engines.rollout.services.engine import ServedModel, ServiceEngine
        from interlace.engines.rollout.services.hosted import HostedEngine
        from interlace.engines.rollout.services.link import ServerLink
        from interlace.engines.rollout.services.protocol import ServiceCapacity

        assert isinstance(engine, NativeEngine)
        limits = engine.limits
        capacity = ServiceCapacity(
            model=recipe.model.path,
            vocab_size=limits.vocab_size,
            context=limits.context,
            max_running=recipe.rollout.max_running,
            dtype=recipe.model.dtype,
            seed=recipe.seed,
        )
        hosted = self.hosted = HostedEngine(engine, capacity)
        settings = ServedConfig(
            heartbeat_s=FOREVER_S, health_timeout_s=FOREVER_S, progress_s=FOREVER_S, start_s=FOREVER_S,
            probe_gap=FOREVER_S,
        )  # fmt: skip
        link = ServerLink(lambda: hosted, settings)
        link.open()
        return ServiceEngine(link, ServedModel(limits=limits, memory=engine.memory()), engine.report())

    async def onload(self) -> None:
        """Loads the engine onto its device. Requests at the routes hold no device, so that nothing else loads it."""
        if self.hosted is not None:
            await self.hosted.wake()

    def add_routes(self, app: "web.Application", key: str) -> None:
        """Registers the engine routes."""
        from interlace.engines.rollout.services.routes import EngineRoutes

        assert self.hosted is not None
        EngineRoutes(self.hosted, key).add_to(app)
