"""`interlace`: the native engine in server processes of `interlace serve`, which the run starts."""

import importlib.util
from typing import TYPE_CHECKING

from interlace.engines.rollout.config import InterlaceConfig
from interlace.engines.rollout.kinds.base import ServedKind, ServerSite, visible_devices
from interlace.engines.rollout.protocol import EngineReport
from interlace.engines.rollout.services.protocol import TRANSPORTS

if TYPE_CHECKING:
    from interlace.engines.rollout.services.process import ServerCommand


COMMAND_LINE = "from interlace.cli.main import app; app()"
"""Code that runs the command line of this package."""


class InterlaceKind(ServedKind):
    """Runs the native engine outside the run's process: its failure does not end the run."""

    Config = InterlaceConfig
    config: InterlaceConfig
    dialect = "interlace"
    report = EngineReport(attention="interlace serve", invariant=True, reason="it is the native engine")
    manifest_transports = TRANSPORTS
    reads_own_names = True
    remark = "the native engine in processes with an address"

    @property
    def draws_known_ids(self) -> bool:
        return True

    def absence(self, pool: str) -> str | None:
        del pool
        if importlib.util.find_spec("aiohttp") is None:
            return "its servers need aiohttp: pip install 'interlace[serve]'."
        return None

    def command(self, server: ServerSite) -> "ServerCommand":
        from interlace.engines.rollout.services.process import ServerCommand

        site, config = server.site, self.config
        port = server.address.url.rpartition(":")[2]
        arguments = (
            *("-c", COMMAND_LINE, "serve", str(server.folder), "--port", port),
            f"model.dtype={site.model.dtype}",
            f"seed={site.seed}",
            f"rollout.max_running={config.max_running}",
            f"rollout.max_tokens={config.kv_tokens}",
            f"rollout.max_batch_tokens={config.max_batch_tokens}",
            f"cluster.devices={'cuda:1' if site.devices[0].startswith('cuda') else 'cpu:1'}",
            f"cluster.threads_per_worker={site.num_threads}",
        )
        environment = {"INTERLACE_ADMIN_KEY": server.address.key, **visible_devices(site.devices)}
        return ServerCommand(arguments=arguments, environment=environment)
