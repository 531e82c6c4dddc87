"""Settings of the native engine: the recipe's `rollout` section. Imports no torch."""

from typing import Literal

from pydantic import Field

from interlace.core.config import Config

KVKind = Literal["slots", "pages"]


class NativeConfig(Config):
    """Sizes, and finer settings that change no sample where the engine reports that it is invariant.

    The switches at the end are there to measure and to test what they turn off.
    """

    max_running: int = Field(default=64, ge=1)
    """Sequences that decode at once in one engine."""
    max_tokens: int = Field(default=65536, ge=1)
    """Tokens that one engine's KV cache holds."""
    max_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens of one forward pass; longer prompts are run in chunks."""
    steps_per_schedule: int = Field(default=64, ge=1)
    """Decode steps between two looks at the queue, at most: they also end after some milliseconds, and with a sequence
    whose row another waits for."""
    draft_tokens: int = Field(default=3, ge=0)
    """Tokens that are guessed and verified at once while few sequences run; 0 turns speculation off."""
    draft_below: int = Field(default=2, ge=0)
    """Running sequences up to which speculation is on. Few rows cost what reading the weights costs, so that guesses
    are nearly free."""
    kv: KVKind = "slots"
    """Contiguous slots, or pages."""
    prefix_cache: bool = True
    """Ended sequences leave their cells to later ones with the same prefix, until the cells are needed."""
    compile_decoder: bool = True
    """The whole forward pass in C++ where the model has the Llama shape; else the transformers model itself."""
    compile_kernels: bool = True
    """C++ kernels where there is a compiler; else torch operations."""
