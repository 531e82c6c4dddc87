"""`sglang`: SGLang's server, one process group per engine. Not run here: its kernels are for GPUs."""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from interlace.engines.rollout.config import SGLangConfig
from interlace.engines.rollout.kinds import Feature
from interlace.engines.rollout.kinds.base import LACKS, ServedKind, ServerSite, visible_devices
from interlace.engines.rollout.protocol import EngineReport

if TYPE_CHECKING:
    from interlace.engines.rollout.services.process import ServerCommand
    from interlace.models.size import ModelSize

INSTALL = "On GPUs: pip install 'interlace[sglang]'. On CPU cores take rollout.engine=native, or vllm."


class SGLangKind(ServedKind):
    """Starts SGLang servers."""

    Config = SGLangConfig
    config: SGLangConfig
    dialect = "sglang"
    report = EngineReport(
        attention="SGLang", invariant=False, reason="SGLang's noise depends on where a request was resumed"
    )
    lacks: ClassVar[Mapping[Feature, str]] = {
        **LACKS,
        "truncation": "its log-probs are from before top_p, top_k and min_p",
        "invariance": "its noise depends on where a request was resumed",
    }
    remark = "SGLang on GPUs: not run here, written against its source"

    def absence(self, pool: str) -> str | None:
        if pool != "cuda":
            return f"SGLang's kernels are for GPUs, and the run's devices are CPU cores. {INSTALL}"
        if importlib.util.find_spec("sglang") is None:
            return f"SGLang is not installed. {INSTALL}"
        return None

    def kv_bytes_per_token(self, size: "ModelSize") -> int:
        return size.latent_kv_bytes_per_token

    def command(self, server: ServerSite) -> "ServerCommand":
        from interlace.engines.rollout.services.process import ServerCommand

        config, site, size = self.config, server.site, server.size
        port = server.address.url.rpartition(":")[2]
        arguments = [
            *("-m", "sglang.launch_server"),
            *("--model-path", str(server.folder)),
            *("--host", "127.0.0.1", "--port", port),
            # SGLang reads its keys from the command line alone; every route needs one.
            *("--api-key", server.address.key, "--admin-api-key", server.address.key),
            *("--dtype", site.model.dtype),
            *("--random-seed", str(site.seed % 2**31)),
            *("--tp-size", str(config.tensor_parallel_size)),
            # SGLang reports no context that it reads in the model's configuration.
            *("--context-length", str(min(size.context or config.kv_tokens, config.kv_tokens))),
            *("--max-running-requests", str(config.max_running)),
            *("--max-total-tokens", str(config.kv_tokens)),
            *("--chunked-prefill-size", str(config.max_batch_tokens)),
            *("--mem-fraction-static", str(config.memory_share)),
            "--enable-memory-saver",
            "--enable-weights-cpu-backup",  # otherwise weights that leave the device are lost
            *(("--trust-remote-code",) if site.model.trust_remote_code else ()),
        ]
        return ServerCommand(arguments=arguments, environment=visible_devices(site.devices))
