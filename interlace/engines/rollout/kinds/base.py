"""Shared parts of the kinds whose engines are servers."""

import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from interlace.engines.rollout.config import ServedConfig, ServiceConfig
from interlace.engines.rollout.kinds import EngineKind, EngineSite, Feature

if TYPE_CHECKING:
    from interlace.engines.rollout.protocol import RolloutEngine
    from interlace.engines.rollout.services.engine import ServiceTraits
    from interlace.engines.rollout.services.http import Address
    from interlace.engines.rollout.services.link import LinkSettings, ServerLink
    from interlace.engines.rollout.services.process import ServerCommand
    from interlace.models.loading import LoadedModel
    from interlace.models.size import ModelSize

LACKS: Mapping[Feature, str] = {
    "raw_logprobs": "it gives log-probs of one kind, those sampled from",
    "kv_offload": "its KV cache is given up when its device changes hands",
    "kv_use": "it does not say how full its KV cache is",
}
"""Abilities that servers lack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSite:
    """Inputs for the start of one server."""

    folder: Path
    """Folder with model and tokenizer, as save_pretrained writes them."""
    site: EngineSite
    address: "Address"
    size: "ModelSize"


class ServedKind(EngineKind, ABC):
    """Kind of engine that is a server process. The run starts it on the number of devices in its settings."""

    config: ServedConfig
    is_service = True
    lacks: ClassVar[Mapping[Feature, str]] = LACKS
    dialect: ClassVar[str]
    """Name of the server's dialect."""
    has_socket_file: ClassVar[bool] = False
    """True if the server listens on a socket file in a private folder instead of a port of the loopback address."""

    def num_devices(self, pool: str) -> int:  # noqa: ARG002 - equal for all pools
        return self.config.tensor_parallel_size

    @abstractmethod
    def command(self, server: ServerSite) -> "ServerCommand":
        """Returns the command line of the server."""

    @abstractmethod
    def traits(self) -> "ServiceTraits":
        """Returns remarks for a report."""

    def create(self, loaded: "LoadedModel", site: EngineSite) -> "RolloutEngine":
        """Starts a server and waits until it is ready. Raises ServiceError, OutOfMemoryError or DiskFullError."""
        from interlace.engines.rollout.live_weights import LiveWeights
        from interlace.engines.rollout.protocol import EngineMemory
        from interlace.engines.rollout.request_checks import Limits
        from interlace.engines.rollout.services.engine import ServedModel, ServiceEngine
        from interlace.models.loading import empty_model
        from interlace.models.size import model_size

        size = model_size(loaded.model)
        private = Path(tempfile.mkdtemp(prefix="interlace-server-"))  # mode 0700: other users cannot enter it
        try:
            link = self._make_link(loaded, site, private, size)
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            raise
        capacity = link.open()
        context = capacity.context or self.config.kv_tokens
        limits = Limits(
            context=context,
            longest=self.longest_sequence(),
            vocab_size=loaded.model.config.get_text_config().vocab_size,
            has_tokenizer=True,
            reads=None,
        )
        model = ServedModel(
            limits=limits,
            weights=LiveWeights(empty_model(site.model)),
            folder=private / "model",
            memory=EngineMemory(
                weights=capacity.weight_bytes or size.weight_bytes,
                kv_cache=capacity.kv_bytes,
            ),
        )
        traits = self.traits()
        held = f", {capacity.kv_bytes / 2**20:,.0f} MiB" if capacity.kv_bytes else ""
        note = f"KV cache of {self.config.kv_tokens:,} tokens{held} (rollout.max_tokens={self.config.max_tokens})"
        return ServiceEngine(link, model, replace(traits, notes=(*traits.notes, note)))

    def _make_link(self, loaded: "LoadedModel", site: EngineSite, private: Path, size: "ModelSize") -> "ServerLink":
        """Saves the model for a server and returns the link to it. The server is not started.

        private: folder that the link removes when it is closed.
        """
        from interlace.engines.rollout.services.dialects import dialect_named
        from interlace.engines.rollout.services.http import UNIX, Address
        from interlace.engines.rollout.services.link import ServerLink
        from interlace.engines.rollout.services.process import ServerProcess, free_port

        loaded.model.save_pretrained(private / "model")
        loaded.tokenizer.save_pretrained(private / "model")
        url = f"{UNIX}{private}/socket" if self.has_socket_file else f"http://127.0.0.1:{free_port()}"
        address = Address(url=url, key=secrets.token_urlsafe(24))
        log = (site.logs or private) / f"rollout-{site.instance}.log"
        command = self.command(ServerSite(folder=private / "model", site=site, address=address, size=size))
        dialect = dialect_named(self.dialect)
        own_stops = end_tokens(loaded)
        return ServerLink(
            lambda: dialect.connect(address, seed=site.seed, own_stops=own_stops),
            link_settings(self.config, start_s=self.config.start_s),
            process=ServerProcess(command, address, log),
            private=private,
        )


def link_settings(config: ServiceConfig, *, start_s: float) -> "LinkSettings":
    """Returns the settings of a link. start_s: seconds for a server to become ready."""
    from interlace.engines.rollout.services.link import LinkSettings

    return LinkSettings(
        heartbeat_s=config.heartbeat_s,
        patience_s=config.health_timeout_s,
        progress_s=config.progress_s,
        start_s=start_s,
        probe_gap=config.probe_gap,
    )


def end_tokens(loaded: "LoadedModel") -> tuple[int, ...]:
    """Returns the tokens at which SGLang ends responses of a model without a request to do so."""
    tool_call_end = loaded.tokenizer.get_added_vocab().get("<|eom_id|>")
    return tuple(sorted({*loaded.stop_token_ids, *([] if tool_call_end is None else [tool_call_end])}))


def visible_devices(devices: tuple[str, ...]) -> dict[str, str]:
    """Returns the environment variables that restrict a server to its devices. devices: as torch names them."""
    if not devices[0].startswith("cuda"):
        return {}
    held = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = held.split(",") if held else None
    numbers = [int(device.partition(":")[2] or 0) for device in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(every[number] if every else str(number) for number in numbers)}
