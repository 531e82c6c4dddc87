"""Shared parts of the kinds whose engines are servers."""

import hashlib
import json
import os
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from interlace.core.errors import InterlaceError
from interlace.engines.rollout.config import ServedConfig
from interlace.engines.rollout.kinds import EngineKind, EngineSite, Feature
from interlace.engines.rollout.protocol import EngineMemory, EngineReport, RolloutEngine

if TYPE_CHECKING:
    from interlace.engines.rollout.services.link import ServerLink
    from interlace.engines.rollout.services.process import ServerCommand, ServerProcess
    from interlace.engines.rollout.services.protocol import Address, ServiceCapacity
    from interlace.models.loading import LoadedModel
    from interlace.models.size import ModelSize

LACKS: Mapping[Feature, str] = {
    "raw_logprobs": "it gives log-probs of one kind, those sampled from",
    "kv_offload": "its KV cache is given up when its device changes hands",
    "kv_use": "it does not say how full its KV cache is",
}
"""Abilities that servers lack."""
LONGEST_PARENT = 64
"""Longest path of the parent of a server's folder, in bytes: systems limit the path of a socket file to 104 or 108."""
PRIVATE = "interlace-server-"
"""Prefix of the private folders of servers."""
MODEL = "model"
"""Name of the model's folder in the private folder of a server."""


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
    report: ClassVar[EngineReport]
    """Report of an engine, with the name of the server as its attention."""
    has_socket_file: ClassVar[bool] = False
    """True if the server listens on a socket file in a private folder instead of a port of the loopback address."""
    manifest_transports: ClassVar[Collection[str]] = ()
    """Transports of the versions that the server reads itself (services/protocol.py)."""
    reads_own_names: ClassVar[bool] = False
    """True if the server reads weights by the names of this package's models, and not only as transformers saves them.
    """

    def num_devices(self, pool: str) -> int:  # noqa: ARG002 - equal for all pools
        return self.config.tensor_parallel_size

    @abstractmethod
    def command(self, server: ServerSite) -> "ServerCommand":
        """Returns the command line of the server."""

    def create(self, loaded: "LoadedModel", site: EngineSite) -> RolloutEngine:
        """Adopts a server of a killed process of the run, or starts one, and waits until it is ready.

        Raises ServiceError, OutOfMemoryError or DiskFullError.
        """
        from interlace.engines.rollout.live_weights import LiveWeights
        from interlace.engines.rollout.request_checks import Limits
        from interlace.engines.rollout.services.engine import ServedModel, ServiceEngine
        from interlace.models.loading import empty_model
        from interlace.models.size import model_size
        from interlace.weights.saved import find_other_form

        size, empty = model_size(loaded.model), empty_model(site.model)
        link, capacity, server, notes = self._open_server(loaded, site, size)
        limits = Limits(
            context=capacity.context or self.config.kv_tokens,
            longest=self.longest_sequence(),
            vocab_size=loaded.model.config.get_text_config().vocab_size,
        )
        model = ServedModel(
            limits=limits,
            weights=LiveWeights(empty),
            tokenizer=loaded.tokenizer,
            form=None if self.reads_own_names else find_other_form(empty),
            folder=server.lease.folder / MODEL,
            manifest_transports=self.manifest_transports,
            manifest_reader=server.pid if self.manifest_transports else None,
            memory=EngineMemory(weights=capacity.weight_bytes or size.weight_bytes, kv_cache=capacity.kv_bytes),
        )
        held = f", {capacity.kv_bytes / 2**20:,.0f} MiB" if capacity.kv_bytes else ""
        note = f"KV cache of {self.config.kv_tokens:,} tokens{held} (rollout.max_tokens={self.config.max_tokens})"
        return ServiceEngine(link, model, replace(self.report, notes=(*notes, note)))

    def _open_server(
        self, loaded: "LoadedModel", site: EngineSite, size: "ModelSize"
    ) -> "tuple[ServerLink, ServiceCapacity, ServerProcess, tuple[str, ...]]":
        """Connects to an adopted server, or else to a new one. Returns notes for a report too."""
        from interlace.engines.rollout.services.adoption import NotAdoptedError
        from interlace.engines.rollout.services.dialects import dialect_named
        from interlace.engines.rollout.services.link import ServerLink

        dialect, own_stops = dialect_named(self.dialect), end_tokens(loaded)

        def link_to(server: "ServerProcess") -> ServerLink:
            return ServerLink(
                lambda: dialect.connect(server.address, seed=site.seed, own_stops=own_stops),
                self.config,
                process=server,
            )

        notes: tuple[str, ...] = ()
        try:
            if server := self._adopt_server(loaded, site, size):
                link = link_to(server)
                try:
                    capacity = link.open()
                except (InterlaceError, OSError) as error:  # TimeoutError is an OSError
                    reason = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else error
                    raise NotAdoptedError(f"the server at {server.address.url} was ended: {reason}") from error
                return link, capacity, server, (f"the server at {server.address.url}, which runs already, is adopted",)
        except NotAdoptedError as error:
            notes = (f"{error}; another one is started",)
        server = self._make_server(loaded, site, size)
        link = link_to(server)
        return link, link.open(), server, notes

    def _adopt_server(self, loaded: "LoadedModel", site: EngineSite, size: "ModelSize") -> "ServerProcess | None":
        """Returns the server that an earlier process of the run left; None if it left none. Raises NotAdoptedError."""
        from interlace.engines.rollout.services.adoption import ServerRecord, adopt_server
        from interlace.engines.rollout.services.lease import record_file

        if site.logs is None:
            return None

        def command(record: ServerRecord) -> "ServerCommand":
            return self.command(
                ServerSite(folder=Path(record.folder) / MODEL, site=site, address=record.address, size=size)
            )

        record = record_file(site.logs.absolute(), site.instance)
        return adopt_server(record, self.config.lease_s, describe_model(loaded), command, detaches=site.detaches)

    def _make_server(self, loaded: "LoadedModel", site: EngineSite, size: "ModelSize") -> "ServerProcess":
        """Saves the model for a server, which is not started."""
        from interlace.engines.rollout.services.adoption import write_record
        from interlace.engines.rollout.services.lease import (
            ServerLease,
            record_file,
            release_folder,
            remove_private_folder,
        )
        from interlace.engines.rollout.services.process import ServerProcess, free_port
        from interlace.engines.rollout.services.protocol import UNIX, Address

        private = make_private_folder()
        try:
            loaded.model.save_pretrained(private / MODEL)
            loaded.tokenizer.save_pretrained(private / MODEL)
            url = f"{UNIX}{private}/socket" if self.has_socket_file else f"http://127.0.0.1:{free_port()}"
            address = Address(url=url, key=secrets.token_hex(24))  # argparse refuses a value with a leading dash
            command = self.command(ServerSite(folder=private / MODEL, site=site, address=address, size=size))
            record = record_file((site.logs or private).absolute(), site.instance)
            lease = ServerLease(seconds=self.config.lease_s if site.logs else 0.0, record=record, folder=private)
            log = write_record(lease, address, command, describe_model(loaded), place=site.place)
        except BaseException:
            remove_private_folder(private)
            release_folder(private)
            raise
        return ServerProcess(command, address, lease, log=log, detaches=site.detaches)


def make_private_folder() -> Path:
    """Makes a folder that only the user can enter, in /tmp if TMPDIR is too long for the path of a socket file.

    Removes such folders that killed runs left.
    """
    from interlace.engines.rollout.services.lease import hold_folder, remove_unused_folders

    is_long = len(os.fsencode(tempfile.gettempdir())) > LONGEST_PARENT
    parent = Path("/tmp" if is_long else tempfile.gettempdir())
    remove_unused_folders(parent, PRIVATE)
    private = Path(tempfile.mkdtemp(prefix=PRIVATE, dir=parent))
    hold_folder(private)
    return private


def describe_model(loaded: "LoadedModel") -> str:
    """Returns a digest of a model's configuration without its path. It does not change when the model is saved."""
    names = {"_name_or_path": "", "architectures": [type(loaded.model).__name__]}  # saving sets the latter
    settings = {**loaded.model.config.to_dict(), **names}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


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
