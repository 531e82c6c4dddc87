"""Forward passes over the tokens of a step, from any rows."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from interlace.core.errors import UserError
from interlace.engines.rollout.attention import AttentionBackend, AttentionHub
from interlace.engines.rollout.kv_store import Int64Array

PAD_ROWS = (4, 8, 16)
"""Candidates for the smallest number of rows in a matrix product. Libraries use other kernels for few rows (MKL for
fewer than 2 to 16, depending on the shape), whose sums differ in bits. The first candidate without a difference on a
probe is used."""


def pad(array: Int64Array, rows: int, fill: int) -> Int64Array:
    """Pads [N] -> [max(N, rows)]."""
    return array if len(array) >= rows else np.pad(array, (0, rows - len(array)), constant_values=fill)


class Given(NamedTuple):
    """Embeddings that replace placeholder tokens in one forward pass."""

    places: Int64Array
    """[P] indices into the pass's tokens, ascending."""
    vectors: Tensor
    """[P, hidden] embeddings."""


class StepTokens(NamedTuple):
    """Tokens of one forward pass, [T] each; the tokens of a row are adjacent."""

    token_ids: Int64Array
    rows: Int64Array
    positions: Int64Array
    wanted: Int64Array
    """[N], ascending: indices of the tokens whose logits are returned."""
    given: Given | None = None
    """Embeddings that replace the ones of some tokens."""


Logits = Callable[[], Tensor]
"""Waits for a started pass and returns [at least N, vocabulary]; rows after the first N are padding. The next pass may
overwrite the result. On an accelerator the transfer of the values may still be in progress."""


class Runner(Protocol):
    """Model execution: from the tokens of a step to logits."""

    dtype: torch.dtype
    binding: object
    """Weight addresses found by rebind(); restored when the weights return to them."""

    @property
    def name(self) -> str:
        """Returns the name of the runner, for the report."""

    @property
    def invariance(self) -> str:
        """Returns the reason why a row's bits are independent of other rows, if they are."""

    def start(self, step: StepTokens) -> Logits:
        """Starts a forward pass, which may last until the returned function is called; no array may change before."""

    def rebind(self) -> None:
        """Updates the addresses after the KV pool or the model's parameters moved."""


def embed_tokens(model: PreTrainedModel, token_ids: Tensor, given: Given) -> Tensor:
    """Returns embeddings [*token_ids.shape, hidden] of the tokens, with the given vectors at the given places."""
    rows: Tensor = model.get_input_embeddings()(token_ids)
    rows.view(-1, rows.shape[-1])[torch.from_numpy(given.places).to(rows.device)] = given.vectors.to(rows.dtype)
    return rows


class ModelRunner:
    """Runner of the transformers model, with attention by a backend."""

    def __init__(self, model: PreTrainedModel, hub: AttentionHub, backend: AttentionBackend, spare_row: int) -> None:
        self.model, self._hub, self._backend, self._spare_row = model, hub, backend, spare_row
        self.dtype, self.name = model.dtype, "the transformers model"
        self.pad_rows = PAD_ROWS[0]
        self.binding: object = None

    @property
    def invariance(self) -> str:
        return f"rows are padded to {self.pad_rows}"

    def start(self, step: StepTokens) -> Logits:
        token_ids, rows, positions, wanted, given = step
        device = self.model.device
        padding = np.arange(max(self.pad_rows - len(rows), 0))
        # Padding tokens write to the spare row, which is never read.
        positions = np.r_[positions, padding] if len(padding) else positions
        rows, token_ids = pad(rows, self.pad_rows, self._spare_row), pad(token_ids, self.pad_rows, 0)
        self._hub.backend = self._backend
        self._backend.begin(rows, positions)
        tokens = torch.from_numpy(token_ids)[None].to(device)
        entered = {"input_ids": tokens} if given is None else {"inputs_embeds": embed_tokens(self.model, tokens, given)}
        out = self.model(
            **entered,
            position_ids=torch.from_numpy(positions)[None].to(device),
            use_cache=False,
            logits_to_keep=torch.from_numpy(pad(wanted, self.pad_rows, 0)).to(device),
        )
        return lambda: out.logits[0]

    def forward(self, token_ids: Tensor, positions: Tensor, model: Callable[..., Any] | None = None) -> Tensor:
        """Runs [T] tokens at [T] positions, after begin() or begin_on_device(). Returns [T, vocabulary].

        model: the compiled model, if that is to run.
        """
        self._hub.backend = self._backend
        run = model or self.model
        logits: Tensor = run(input_ids=token_ids[None], position_ids=positions[None], use_cache=False).logits
        return logits[0]

    def rebind(self) -> None:
        """Does nothing: the model finds its tensors."""


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
