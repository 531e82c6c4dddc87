"""Settings of rollout engines, a recipe's `rollout` section: what all have, and what each adds. Imports no torch."""

from typing import Literal

from pydantic import Field

from interlace.core.config import Config

KVKind = Literal["slots", "pages"]


class EngineConfig(Config):
    """Settings that every engine has."""

    engine: str = "native"
    """A built-in (native, address, interlace, vllm, sglang), or your own as package.module:Class."""
    max_running: int = Field(default=64, ge=1)
    """Sequences that decode at once in one engine."""
    max_tokens: int = Field(default=65536, ge=1)
    """Tokens that one engine's KV cache holds."""
    max_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens of one forward pass; longer prompts are run in chunks."""


class SpanningConfig(EngineConfig):
    """A further setting of engines that may span several devices."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one engine spans: schedule.placement.rollout.devices_per_instance is the same. A native engine is
    a process on each of them; it then runs the transformers model, since the C++ decoder is for whole models."""


class NativeConfig(SpanningConfig):
    """Finer settings, which change no sample where the engine reports that it is invariant.

    The switches at the end are there to measure and to test what they turn off.
    """

    steps_per_schedule: int = Field(default=64, ge=1)
    """Decode steps between two looks at the queue, at most: they also end after some milliseconds, and with a sequence
    whose row another waits for."""
    draft_tokens: int = Field(default=3, ge=0)
    """Tokens that are guessed and verified at once while few sequences run; 0 turns speculation off."""
    draft_below: int = Field(default=2, ge=0)
    """Running sequences up to which speculation is on. Few rows cost what reading the weights costs, so that guesses
    are nearly free."""
    weights: Literal["model", "int8"] = "model"
    """Type of the products: the model's own, or eight bits with a scale for each output. int8 samples from another
    distribution than is trained, with its own log-probs, so the algorithm has to correct for it."""
    kv: KVKind = "slots"
    """Contiguous slots, or pages."""
    prefix_cache: bool = True
    """Ended sequences leave their cells to later ones with the same prefix, until the cells are needed."""
    compile_decoder: bool = True
    """The whole forward pass in C++ where the model has the Llama shape; else the transformers model itself."""
    cuda_graphs: bool = True
    """On a GPU, decode steps replay captured graphs; a model that cannot be captured runs without them."""
    compile_kernels: bool = True
    """C++ kernels where there is a compiler; else torch operations."""


class ServiceConfig(EngineConfig):
    """Settings of engines that are servers: when one counts as lost."""

    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two questions for a server's health."""
    health_timeout_s: float = Field(default=15.0, gt=0)
    """Seconds without an answer about its health after which a server counts as lost."""
    progress_s: float = Field(default=120.0, gt=0)
    """Seconds without a token of any running request after which a server counts as lost."""
    lost_s: float = Field(default=600.0, gt=0)
    """Seconds without any engine after which the run ends with an error; until then it waits for one to return."""
    probe_gap: float = Field(default=0.05, gt=0)
    """Largest mean difference, in nats, of a server's log-probs of a fixed text from the trainer's log-probs after each
    update. A server beyond it serves other weights than it reports, and counts as lost."""


class AddressConfig(ServiceConfig):
    """Settings of servers that already run."""

    engine: str = "address"
    urls: tuple[str, ...] = ()
    """Addresses, one for each server: http://HOST:PORT, https://HOST, or unix:PATH of a socket file."""
    urls_file: str | None = None
    """File with one address a line. The run reads it again when it changes: servers join and leave by it."""
    dialect: str = "interlace"
    """Kind of the servers: interlace (`interlace serve`), vllm, sglang."""
    key_env: str | None = None
    """Name of the environment variable that holds the servers' key: for our servers the control key."""


class ServedConfig(ServiceConfig, SpanningConfig):
    """Settings of servers that the run starts."""

    start_s: float = Field(default=600.0, gt=0)
    """Seconds for a server to start before the start counts as failed."""


class InterlaceConfig(ServedConfig):
    """Settings of the native engine in server processes."""

    engine: str = "interlace"


class VLLMConfig(ServedConfig):
    """Further settings for vLLM."""

    engine: str = "vllm"
    enforce_eager: bool | None = None
    """No graphs and no compilation; None: so on a CPU alone."""


class SGLangConfig(ServedConfig):
    """Further settings for SGLang."""

    engine: str = "sglang"
    memory_share: float = Field(default=0.8, gt=0, le=1)
    """Share of a device's memory for weights and KV cache: a bound in addition to max_tokens."""
