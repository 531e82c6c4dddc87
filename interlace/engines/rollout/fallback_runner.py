"""Fallback for models whose attention does not use transformers' interface: slow but always correct."""

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from interlace.core.errors import UserError
from interlace.engines.rollout.runner import Given, Logits, StepTokens, embed_tokens


class PlainRunner:
    """Runs each row alone with the model's attention and, if it works, the model's cache."""

    invariance = "rows run alone"

    def __init__(self, model: PreTrainedModel, *, use_cache: bool) -> None:
        self._model, self._use_cache = model, use_cache
        self.dtype, self.name = model.dtype, "one sequence at a time"
        self.binding: object = None
        self._tokens: dict[int, list[int]] = {}
        self._caches: dict[int, Any] = {}  # The class of a cache depends on the architecture.
        self._vectors: dict[int, dict[int, Tensor]] = {}
        """Row -> position -> embedding that replaces the token's embedding."""

    def start(self, step: StepTokens) -> Logits:
        """Raises UserError if embeddings are given and the model has a cache, which is for tokens alone."""
        token_ids, rows, positions, wanted, given = step
        if given is not None and self._use_cache:
            raise UserError(
                f"{type(self._model).__name__} runs by the plain fallback, which takes no arrays beside tokens. "
                "Take a model that attends through transformers' attention interface."
            )
        for row in {int(row) for row in rows[positions == 0]}:
            self._vectors.pop(row, None)
        for place, vector in zip(given.places, given.vectors, strict=True) if given is not None else ():
            self._vectors.setdefault(int(rows[place]), {})[int(positions[place])] = vector
        logits: list[Tensor] = []
        bounds = [at for at in range(len(rows)) if at == 0 or rows[at] != rows[at - 1]] + [len(rows)]
        for start, end in itertools.pairwise(bounds):
            logits.append(self._run_row(int(rows[start]), token_ids[start:end].tolist(), int(positions[start])))
        return lambda: torch.cat(logits)[torch.from_numpy(wanted).to(self._model.device)]

    def _run_row(self, row: int, token_ids: list[int], start: int) -> Tensor:
        """Runs the next tokens of a row and returns [len(token_ids), vocabulary]. Position 0 starts a new sequence."""
        device = self._model.device
        known = self._tokens.get(row, [])[:start] + token_ids
        self._tokens[row] = known
        if not self._use_cache:
            out = self._model(**self._make_inputs(row, torch.tensor([known], device=device)), use_cache=False)
            return out.logits[0, start:]
        out = self._model(
            input_ids=torch.tensor([token_ids], device=device),
            attention_mask=torch.ones(1, len(known), dtype=torch.int64, device=device),
            past_key_values=self._caches.get(row) if start else None,
            use_cache=True,
        )
        self._caches[row] = out.past_key_values
        return out.logits[0]

    def _make_inputs(self, row: int, tokens: Tensor) -> dict[str, Tensor]:
        """Returns the arguments of a row's pass: its tokens, or their embeddings if some are given."""
        vectors = self._vectors.get(row)
        if not vectors:
            return {"input_ids": tokens}
        places = np.asarray(sorted(vectors))
        given = Given(places, torch.stack([vectors[int(place)] for place in places]))
        return {"inputs_embeds": embed_tokens(self._model, tokens, given)}

    def rebind(self) -> None:
        """Does nothing: the model finds its tensors."""

    def clear(self) -> None:
        """Drops all cached state; every row has to start again at 0."""
        self._tokens.clear()
        self._vectors.clear()
        self._caches.clear()
