"""The native engine's finer settings. None of them changes a sample where the engine reports that it is invariant."""

from typing import Literal

from pydantic import Field

from interlace.core.config import Config

KVKind = Literal["slots", "pages"]


class EngineOptions(Config):
    """Defaults serve; the switches at the end are there to measure and to test what they turn off."""

    steps_per_schedule: int = Field(default=64, ge=1)
    """Decode steps between two looks at the queue, at most: they also end after some milliseconds, and with a sequence
    whose row another waits for."""
    draft_tokens: int = Field(default=3, ge=0)
    """Tokens that are guessed and verified at once while few sequences run; 0 turns speculation off."""
    draft_below: int = Field(default=2, ge=0)
    """Running sequences up to which it is on. Few rows cost what reading the weights costs: guesses are nearly free."""
    num_threads: int = Field(default=1, ge=1)
    """Of torch, for the whole process, where two that contend make small products hundreds of times slower; and of the
    C++ decoder, where each takes whole rows and waits for no other before the end of the pass."""
    kv: KVKind = "slots"
    """Contiguous slots, or pages."""
    prefix_cache: bool = True
    """Ended sequences leave their cells to whoever shares a prefix, until they are needed."""
    compile_decoder: bool = True
    """The whole forward pass in C++ where the model has the Llama shape; else the transformers model itself."""
    compile_kernels: bool = True
    """C++ kernels where there is a compiler; else torch operations."""
