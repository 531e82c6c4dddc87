"""Sequence lengths at which a model's computation changes, found in its configuration.

A probe of a dozen tokens does not cover a model whose attention temperature changes at token 8,192, or whose indexer
selects among more than 2,048 keys. The engines probe beyond each of these lengths. If a length is too large to reach,
it is lowered in the model during the probe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_ERRORS = (
    RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError, ZeroDivisionError,
)  # fmt: skip
"""Errors that a forward pass of an unknown architecture can raise."""
REACHED = 128
"""Longest change, in tokens, that is probed at its real length. A later change is lowered to LOWERED."""
LOWERED = 8
MARGIN = 5
"""Tokens of a probe after the change."""
_WINDOWS = re.compile(r"(^|_)(sliding_window|attention_window|window_size)$")
_OTHERS = re.compile(
    r"(^|_)(chunk_size|floor_scale|topk|budget|block_size|compress_ratio|local_blocks|topk_blocks|local_window)$"
)
_INDEXED = re.compile(r"^(index|indexer|attention|attn|sparse|compress|mamba|lightning|moba|nsa|floor|chunk|block)_?")
_ROPE_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthChange:
    """A configuration field that changes the computation from a given length."""

    field: str
    tokens: int
    is_window: bool
    """True for an attention window: the attention function receives it as an argument, so an engine sees it at any
    length."""

    @property
    def probe_tokens(self) -> int:
        """Returns the length of a probe that passes the change."""
        return (self.tokens if self.tokens <= REACHED else LOWERED) + MARGIN

    @property
    def is_reached(self) -> bool:
        """Returns True if a probe passes the change at its real length."""
        return self.tokens <= REACHED


def find_length_changes(config: PretrainedConfig, longest: int | None = None) -> list[LengthChange]:
    """Lists the lengths at which the configuration changes the computation, the shortest first.

    longest: tokens of the longest sequence; changes beyond it are omitted.
    The static forms of rope scaling (linear, yarn, llama3) are equal at every length, and a longrope model is limited
    to the reach of its short factors (`context_length`), so they are not listed.
    """
    found: dict[str, LengthChange] = {}
    for name, value in _iterate_integers(config.get_text_config().to_dict()):
        is_window = bool(_WINDOWS.search(name))
        if not (is_window or name == _ROPE_LENGTH or (_OTHERS.search(name) and _INDEXED.search(name))):
            continue
        if value < 2 or (longest is not None and value >= longest):
            continue
        found[name] = LengthChange(field=name, tokens=value, is_window=is_window)
    return sorted(found.values(), key=lambda change: change.tokens)


def _iterate_integers(settings: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """Yields the integer fields. The length of rope scaling counts only if attention is scaled from that length."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _iterate_integers(value)
            continue
        scales = name != _ROPE_LENGTH or "llama_4_scaling_beta" in settings
        if scales and isinstance(value, int) and not isinstance(value, bool):
            yield name, value


@contextmanager
def lower_limit(model: PreTrainedModel, change: LengthChange) -> Iterator[None]:
    """Lowers a change to LOWERED tokens in the model's modules and configurations; restores the values at the end."""
    undo: list[tuple[object, str]] = []

    def lower(holder: object, name: str) -> None:
        fields = holder if isinstance(holder, MutableMapping) else vars(holder)
        if name in fields and type(fields[name]) in (int, float) and fields[name] == change.tokens:
            fields[name] = type(fields[name])(LOWERED)
            undo.append((holder, name))

    configs = {id(config): config for config in _iterate_configs(model)}.values()
    rotations = [part for config in configs for part in _iterate_mappings(vars(config))]
    for holder in (*configs, *rotations, *model.modules()):
        lower(holder, change.field)
    try:
        yield
    finally:
        for holder, name in undo:
            fields = holder if isinstance(holder, MutableMapping) else vars(holder)
            fields[name] = type(fields[name])(change.tokens)


def _iterate_configs(model: PreTrainedModel) -> Iterator[PretrainedConfig]:
    yield from (model.config, model.config.get_text_config())
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            yield config


def _iterate_mappings(fields: Mapping[str, object]) -> Iterator[MutableMapping[str, object]]:
    for value in fields.values():
        if isinstance(value, MutableMapping):
            yield value
            yield from _iterate_mappings(value)


def probe_ids(vocab_size: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Returns deterministic token ids for a probe."""
    steps = torch.arange(num_tokens, device=device)
    return (steps * 7 + steps.square() % 11) % vocab_size
