"""Input arrays of requests in addition to tokens: their check, and their embeddings for one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from interlace.core.types import Inputs, IntArray
from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.runner import Given
from interlace.engines.rollout.sequence import SequenceTable
from interlace.models.inputs import InputEmbedding, input_embedding

BLOCK = 16
"""Observations embedded in one call. Smaller batches are padded to this number: all calls have one shape, so the other
observations of a call do not change the bits of a row."""


@dataclass(frozen=True, slots=True)
class InputReader:
    """Arrays that a model reads."""

    embedding: InputEmbedding

    def fault(self, prompt_ids: Sequence[int] | IntArray, inputs: Inputs) -> str | None:
        """Returns the reason why these arrays do not fit a prompt; None if they fit."""
        shapes = self.embedding.shapes
        if set(inputs) != set(shapes):
            return f"it has arrays {sorted(inputs)}, and the model reads {sorted(shapes)}."
        counts = {len(array) for array in inputs.values()}
        for name, array in inputs.items():
            if array.shape[1:] != shapes[name] or len(counts) > 1:
                return f"{name} has shape {list(array.shape)}, and the model reads [N, {str(list(shapes[name]))[1:]}."
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return f"{name} holds a number that is not finite."
        found = np.count_nonzero(np.asarray(prompt_ids) == self.embedding.placeholder)
        wanted = counts.pop() * self.embedding.per_observation
        return None if found == wanted else f"its prompt has {found} placeholder tokens, and its arrays fill {wanted}."


def input_reader(model: PreTrainedModel) -> InputReader | None:
    """Returns the arrays that a model reads in addition to tokens; None if it reads tokens only."""
    found = input_embedding(model.config)
    return None if found is None else InputReader(found)


class InputEmbedder:
    """Embeddings of the placeholder tokens of a pass, computed with the current weights."""

    def __init__(self, model: PreTrainedModel, table: SequenceTable) -> None:
        self._model, self._table = model, table
        self._reads = input_embedding(model.config)

    def given(self, rows: Int64Array, positions: Int64Array, token_ids: Int64Array) -> Given | None:
        """Returns the embeddings of a pass's placeholders; None if there are none. rows, positions, token_ids [T]."""
        if self._reads is None:
            return None
        places = np.flatnonzero(token_ids == self._reads.placeholder)
        inputs = {int(row): self._table.occupant(int(row)).request.inputs for row in np.unique(rows[places])}
        places = places[[inputs[int(row)] is not None for row in rows[places]]] if len(places) else places
        if not len(places):
            return None
        present = {row: arrays for row, arrays in inputs.items() if arrays is not None}
        vectors = self._embed_inputs(list(present.values()))
        first, begins = 0, {}
        for row, arrays in present.items():
            begins[row] = first
            first += self._reads.per_observation * len(next(iter(arrays.values())))
        chosen = [begins[int(rows[at])] + self._count_placeholders(int(rows[at]), int(positions[at])) for at in places]
        return Given(places, vectors[chosen])

    def _count_placeholders(self, row: int, position: int) -> int:
        """Counts the row's placeholders before a position."""
        reads = self._reads
        return int(np.count_nonzero(self._table.token_ids[row, :position] == reads.placeholder)) if reads else 0

    def _embed_inputs(self, each: Sequence[Inputs]) -> Tensor:
        """Computes the embeddings of all placeholders, [placeholders, hidden]."""
        arrays = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
        return embed_in_blocks(self._model, arrays)


@torch.inference_mode()
def embed_in_blocks(model: PreTrainedModel, arrays: Inputs) -> Tensor:
    """Computes the embeddings [N x placeholders per observation, hidden] of N observations."""
    count = len(next(iter(arrays.values())))
    padded = {
        name: torch.from_numpy(np.pad(array, ((0, -count % BLOCK), *[(0, 0)] * (array.ndim - 1)))).to(model.device)
        for name, array in arrays.items()
    }
    body: Any = model.base_model  # transformers' stub lacks embed_inputs
    blocks = [
        body.embed_inputs({name: tensor[start : start + BLOCK] for name, tensor in padded.items()})
        for start in range(0, count, BLOCK)
    ]
    return torch.cat(blocks)[:count].flatten(0, 1)
