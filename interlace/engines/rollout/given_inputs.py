"""Embeddings of the input arrays of requests for one forward pass."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from interlace.core.types import Inputs
from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.runner import Given
from interlace.engines.rollout.sequence import SequenceTable
from interlace.models.inputs import InputEmbedding

BLOCK = 16
"""Observations embedded in one call. Smaller batches are padded to this number: all calls have one shape, so the other
observations of a call do not change the bits of a row."""


class InputEmbedder:
    """Embeddings of the placeholder tokens of a pass, computed with the current weights."""

    def __init__(self, model: PreTrainedModel, reads: InputEmbedding, table: SequenceTable) -> None:
        self._model, self._reads, self._table = model, reads, table

    def given(self, rows: Int64Array, positions: Int64Array, token_ids: Int64Array) -> Given | None:
        """Returns the embeddings of a pass's placeholders; None if there are none. rows, positions, token_ids [T]."""
        places = np.flatnonzero(token_ids == self._reads.placeholder)
        inputs = {int(row): self._table.occupant(int(row)).request.inputs for row in np.unique(rows[places])}
        places = places[[inputs[int(row)] is not None for row in rows[places]]] if len(places) else places
        if not len(places):
            return None
        present = {row: arrays for row, arrays in inputs.items() if arrays is not None}
        names = next(iter(present.values()))
        vectors = embed_in_blocks(
            self._model, {name: np.concatenate([arrays[name] for arrays in present.values()]) for name in names}
        )
        first, begins = 0, {}
        for row, arrays in present.items():
            begins[row] = first
            first += self._reads.per_observation * len(next(iter(arrays.values())))
        chosen = []
        for row, position in zip(rows[places].tolist(), positions[places].tolist(), strict=True):
            earlier = np.count_nonzero(self._table.token_ids[row, :position] == self._reads.placeholder)
            chosen.append(begins[row] + int(earlier))
        return Given(places, vectors[chosen])


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
