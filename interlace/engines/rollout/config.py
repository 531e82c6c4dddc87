"""Settings of rollout engines, the section `rollout` of a recipe, for all engines and for each kind; without torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from interlace.core.config import Config

KVKind = Literal["slots", "pages"]
AUTO_TOKENS = 65536
"""Longest sequence, in tokens, of an engine whose KV cache has the size `auto`."""


class EngineConfig(Config):
    """Settings of every engine."""

    engine: str = "native"
    """Name of a built-in engine (native, address, interlace, vllm, sglang), or package.module:Class of your own."""
    max_running: int = Field(default=64, ge=1)
    """Most sequences that one engine decodes at the same time."""
    max_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Capacity of one engine's KV cache, in tokens. With auto, a native engine takes the size from the free memory of
    its device at its start; other engines take 65536. A sequence then has at most 65536 tokens on every device."""
    max_batch_tokens: int = Field(default=2048, ge=1)
    """Most tokens of one forward pass; longer prompts run in chunks."""

    @property
    def kv_tokens(self) -> int:
        """Returns max_tokens as a number, for forecasts and for the length of a sequence; of auto, AUTO_TOKENS."""
        return AUTO_TOKENS if self.max_tokens == "auto" else self.max_tokens


class SpanningConfig(EngineConfig):
    """Setting of engines that may span several devices."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one engine spans; must equal schedule.placement.rollout.devices_per_instance. A native engine then
    has one process per device and runs the transformers model, because the C++ decoder is for whole models."""


class NativeConfig(SpanningConfig):
    """Performance settings of the native engine. They change no sample if the engine reports that it is invariant.

    The switches at the end exist to measure and to test the features that they turn off.
    """

    steps_per_schedule: int = Field(default=64, ge=1)
    """Most decode steps between two checks of the queue. The steps also end after some milliseconds, and when a
    sequence ends whose row another one waits for."""
    draft_tokens: int = Field(default=3, ge=0)
    """Tokens that are guessed and verified at once while few sequences run; 0 turns speculation off."""
    draft_below: int = Field(default=2, ge=0)
    """Most running sequences with speculation. For few rows, a forward pass is limited by reading the weights, so
    guesses are nearly free."""
    weights: Literal["model", "int8"] = "model"
    """Type of the matrix products: the model's type, or int8 with a scale per output. int8 samples from another
    distribution than the trained one, with the log-probs of that distribution, so the algorithm has to correct for it.
    """
    kv: KVKind = "slots"
    """Layout of the KV cache: contiguous slots, or pages."""
    prefix_cache: bool = True
    """Keeps the cells of ended sequences for later ones with the same prefix, until the cells are needed."""
    compile_decoder: bool = True
    """Runs the whole forward pass of models of the Llama shape in C++; other models run in transformers."""
    cuda_graphs: bool = True
    """Replays captured graphs in decode steps on a GPU; a model that cannot be captured runs without them."""
    compile_model: bool = True
    """Compiles the model of captured graphs by torch.compile, which takes 20 s at the first start on a machine. The
    compiled model rounds in other places than the trained one, within the gap that the engine accepts."""
    compile_kernels: bool = True
    """Replaces torch operations by C++ kernels if a compiler exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVNeeds:
    """Facts about a run that determine the size of its engines' KV caches."""

    longest: int = 1
    """Tokens of the longest sequence of the run."""
    reserved_bytes: int = 0
    """Bytes of an engine's devices that other workers need."""
    copied_bytes: int = 0
    """Bytes of weights that an engine keeps in addition, in eight bits or without an adapter."""


class ServiceConfig(EngineConfig):
    """Settings of server engines: the limits after which a server counts as lost."""

    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two health checks of a server."""
    health_timeout_s: float = Field(default=15.0, gt=0)
    """Seconds without an answer to health checks after which a server counts as lost."""
    progress_s: float = Field(default=120.0, gt=0)
    """Seconds without a token of any running request after which a server counts as lost."""
    lost_s: float = Field(default=600.0, gt=0)
    """Seconds without any engine after which the run ends with an error; until then it waits for one to return."""
    probe_gap: float = Field(default=0.05, gt=0)
    """Largest mean difference, in nats, between a server's and the trainer's log-probs of a fixed text, checked after
    each update. A server with a larger difference does not serve the weights that it reports, and counts as lost."""


class AddressConfig(ServiceConfig):
    """Settings of servers that already run."""

    engine: str = "address"
    urls: tuple[str, ...] = ()
    """Addresses, one per server: http://HOST:PORT, https://HOST, or unix:PATH of a socket file."""
    urls_file: str | None = None
    """File with one address per line. The run reads it again when it changes, so that servers can join and leave."""
    urls_dns: str | None = Field(default=None, pattern=r"^http://[^/@:]+:\d+/?$")
    """Address http://NAME:PORT whose name has an IP address for each server, as a headless service of Kubernetes has.
    The run resolves it every few seconds, so that servers can join and leave."""
    dialect: str = "interlace"
    """API of the servers: interlace (`interlace serve`), vllm, sglang."""
    key_env: str | None = None
    """Name of the environment variable with the servers' key; for interlace servers, the control key."""


class ServedConfig(ServiceConfig, SpanningConfig):
    """Settings of servers that the run starts."""

    start_s: float = Field(default=600.0, gt=0)
    """Seconds for a server to start before the start counts as failed."""
    lease_s: float = Field(default=60.0, ge=0)
    """Seconds for which the servers outlive a command that was killed. In this time a resumed run adopts them instead
    of starting others. With 0 they end with the command."""


class InterlaceConfig(ServedConfig):
    """Settings of the native engine in server processes."""

    engine: str = "interlace"

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size = {self.tensor_parallel_size}, and a server of `interlace serve` computes on "
                "one device; set it to 1, or take engine native, vllm or sglang"
            )
        return self


class VLLMConfig(ServedConfig):
    """Settings of vLLM servers."""

    engine: str = "vllm"
    enforce_eager: bool | None = None
    """Turns vLLM's graphs and compilation off. If None, they are off on a CPU alone."""


class SGLangConfig(ServedConfig):
    """Settings of SGLang servers."""

    engine: str = "sglang"
    memory_share: float = Field(default=0.8, gt=0, le=1)
    """Share of a device's memory for weights and KV cache: a limit in addition to max_tokens."""
