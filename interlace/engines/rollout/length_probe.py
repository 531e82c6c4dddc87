"""Checks of a runner beyond each length at which the model's configuration changes the computation."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from interlace.engines.cpu.verify import SHORT, Probe, reference_logits
from interlace.engines.rollout.kv_store import KVStore
from interlace.engines.rollout.runner import Runner
from interlace.models.length_changes import MARGIN, LengthChange, find_length_changes, lower_limit, probe_ids

_ROWS = 2
"""Rows of a probe: the sequence that passes the change, and one before it in the same forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthProbe:
    """A sequence that passes a change, with the logits of the model's attention."""

    change: LengthChange
    prompt: list[int]
    expected: Tensor
    is_lowered_without_effect: bool
    """True if the change is too long to reach and the model does not read the lowered value."""


def build_length_probes(model: PreTrainedModel, longest: int) -> list[LengthProbe]:
    """Prepares the probes, with the model's attention. longest: length of the longest served sequence, in tokens.

    A window larger than the reach of a probe is omitted, because attention receives it as an argument.
    """
    probes = []
    for change in find_length_changes(model.config, longest):
        if change.is_window and not change.is_reached:
            continue
        length = min(change.probe_tokens, longest)
        prompt = probe_ids(model.config.get_text_config().vocab_size, length, torch.device("cpu")).tolist()
        with _at_probe(model, change):
            expected = reference_logits(model, [prompt])[0]
        without = not change.is_reached and torch.equal(expected, reference_logits(model, [prompt])[0])
        probes.append(LengthProbe(change=change, prompt=prompt, expected=expected, is_lowered_without_effect=without))
    return probes


def find_length_fault(model: PreTrainedModel, runner: Runner, store: KVStore, probes: list[LengthProbe]) -> str | None:
    """Returns the first difference between the runner and the model, or None. The store is empty before and after."""
    for probe in probes:
        change = probe.change
        if probe.is_lowered_without_effect:
            return f"its {change.field} = {change.tokens} could not be probed"
        rows = _ROWS if store.num_cells >= _ROWS * max(len(probe.prompt), SHORT) else 1
        cells = Probe(runner, store, rows, tokens=len(probe.prompt))
        with _at_probe(model, change):
            fault = cells.length_fault(probe.prompt, probe.expected, len(probe.prompt) - MARGIN)
        cells.close()
        if fault is not None:
            return f"{fault} beyond {change.field} = {change.tokens}"
    return None


@contextmanager
def _at_probe(model: PreTrainedModel, change: LengthChange) -> Iterator[None]:
    with nullcontext() if change.is_reached else lower_limit(model, change):
        yield
