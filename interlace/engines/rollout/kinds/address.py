"""`address`: servers that already run."""

import importlib.util
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from interlace.core.errors import UserError
from interlace.engines.rollout.config import AddressConfig
from interlace.engines.rollout.kinds import EngineKind, EngineSite, Feature
from interlace.engines.rollout.kinds.base import LACKS, end_tokens
from interlace.engines.rollout.protocol import EngineReport, RolloutEngine

if TYPE_CHECKING:
    from interlace.models.loading import LoadedModel


class AddressKind(EngineKind):
    """Connects to the servers at `rollout.urls`, with any model that they serve."""

    Config = AddressConfig
    config: AddressConfig
    is_service = True
    lacks: ClassVar[Mapping[Feature, str]] = LACKS
    remark = "servers that already run: interlace serve, vLLM, SGLang (rollout.urls, rollout.dialect)"

    @property
    def draws_known_ids(self) -> bool:
        return self.config.dialect == "interlace"

    @property
    def num_addresses(self) -> int:
        return len(self.urls)

    @property
    def urls(self) -> tuple[str, ...]:
        """Returns the addresses of the recipe, of its file and of its DNS name, each once."""
        return tuple(dict.fromkeys((*self.config.urls, *self.find_changing_urls())))

    def find_changing_urls(self) -> tuple[str, ...]:
        """Reads `urls_file` and resolves `urls_dns`, whose addresses can change during a run. Raises UserError."""
        return tuple(dict.fromkeys((*read_urls(self.config.urls_file), *resolve_urls(self.config.urls_dns))))

    def check_urls(self) -> tuple[str, ...]:
        """Returns `urls`. Raises UserError for an address that is written twice or malformed, and without any."""
        from interlace.engines.rollout.services.protocol import SCHEMES

        config = self.config
        file = f"rollout.urls_file = {config.urls_file!r}"
        listed = read_urls(config.urls_file)
        for setting, urls in (("rollout.urls", config.urls), (file, listed)):
            for place, url in enumerate(urls):
                if url in urls[:place]:
                    raise UserError(f"{setting} has {url} twice. Name each server once.")
                if not url.startswith(SCHEMES):
                    raise UserError(
                        f"{setting}: {url!r} is not the address of a server: write http://HOST:PORT, https://HOST or "
                        "unix:PATH."
                    )
        found = tuple(dict.fromkeys((*config.urls, *listed, *resolve_urls(config.urls_dns))))
        if not found:
            where = f"{file} has no address. Write one address a line into it, or set" if config.urls_file else "set"
            raise UserError(
                f"rollout.engine=address needs servers: {where} rollout.urls=[http://HOST:PORT], urls_file or urls_dns."
            )
        return found

    @property
    def key(self) -> str:
        """Returns the servers' key. Raises UserError if its environment variable is not set."""
        name = self.config.key_env
        if name is None:
            return ""
        if name not in os.environ:
            raise UserError(f"rollout.key_env = {name!r}, and the environment has no such variable. Set it to the key.")
        return os.environ[name]

    def absence(self, pool: str) -> str | None:
        del pool  # The devices are the servers' own.
        if importlib.util.find_spec("aiohttp") is None:
            return "engines at an address need aiohttp: pip install 'interlace[serve]'."
        return None

    def create(self, loaded: "LoadedModel", site: EngineSite) -> RolloutEngine:
        """Connects to one server, selected by its address or the index of the instance.

        Raises ServiceError or UserError.
        """
        from interlace.engines.rollout.live_weights import LiveWeights
        from interlace.engines.rollout.request_checks import Limits
        from interlace.engines.rollout.services.dialects import dialect_named
        from interlace.engines.rollout.services.engine import ServedModel, ServiceEngine
        from interlace.engines.rollout.services.link import ServerLink
        from interlace.engines.rollout.services.protocol import TRANSPORTS, Address
        from interlace.models.loading import empty_model
        from interlace.weights.saved import find_other_form

        address = Address(url=site.url or self.urls[site.instance], key=self.key)
        dialect = dialect_named(self.config.dialect)
        own_stops = end_tokens(loaded)
        link = ServerLink(lambda: dialect.connect(address, seed=site.seed, own_stops=own_stops), self.config)
        capacity = link.open()
        context = capacity.context or self.config.kv_tokens
        vocab_size = loaded.model.config.get_text_config().vocab_size
        limits = Limits(context=context, longest=max(context, self.config.kv_tokens), vocab_size=vocab_size)
        is_ours = self.config.dialect == "interlace"
        same_noise = is_ours and capacity.seed == site.seed
        other_noise = f"the server draws with seed {capacity.seed}, and the run's seed is {site.seed}"
        report = EngineReport(
            attention=f"a server of dialect {self.config.dialect}",
            invariant=same_noise,
            reason="it is the native engine" if is_ours else "its kernels depend on the batch",
            notes=(other_noise,) if is_ours and not same_noise else (),
        )
        empty = empty_model(site.model)
        model = ServedModel(
            limits=limits,
            weights=LiveWeights(empty),
            tokenizer=loaded.tokenizer,
            form=None if is_ours else find_other_form(empty),
            manifest_transports=TRANSPORTS if is_ours else (),
            manifest_reader=0 if is_ours else None,
        )
        return ServiceEngine(link, model, report)


def read_urls(file: str | None) -> tuple[str, ...]:
    """Reads a file with one address per line; # starts a comment line. Raises UserError if the file is missing."""
    if file is None:
        return ()
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"rollout.urls_file = {file!r}: there is no such file. Write one address a line into it.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(
            f"rollout.urls_file = {file!r} is not text in UTF-8. Write one address a line into it."
        ) from None
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def resolve_urls(url: str | None) -> tuple[str, ...]:
    """Resolves the host of an address. Returns one address per IPv4 address, or per IPv6 address if it has no other.

    Raises UserError if the host is unknown, or the host or the port is not valid.
    """
    if url is None:
        return ()
    parts = urlsplit(url)
    try:
        infos = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except ValueError as error:
        raise UserError(f"rollout.urls_dns = {url!r} is not an address: {error}. Write http://NAME:PORT.") from None
    except OSError as error:
        raise UserError(f"rollout.urls_dns = {url!r}: the host is unknown: {error}. Correct the name.") from None
    hosts = {str(info[4][0]) for info in infos if info[0] == socket.AF_INET}
    hosts = hosts or {f"[{info[4][0]}]" for info in infos if info[0] == socket.AF_INET6}
    return tuple(f"http://{host}:{parts.port}" for host in sorted(hosts))
