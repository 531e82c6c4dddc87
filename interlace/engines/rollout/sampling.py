"""Sampling of tokens from logits, with noise that depends only on the request and the position."""

import ctypes
from typing import NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interlace.core.errors import InterlaceError
from interlace.core.types import BoolArray
from interlace.engines.cpu import kernels
from interlace.engines.rollout.filters import draw_truncated, reshape_logits, reshapes_logits, truncates
from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.sequence import SequenceTable
from interlace.models.action_head import FlowHead

FloatRows = NDArray[np.float32]
_ONE, _GOLDEN = np.uint64(1), np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT, _UNUSED_BITS = np.uint64(31), np.uint64(11)


def draw_keyed_uniform(keys: NDArray[np.uint64], positions: Int64Array) -> NDArray[np.float64]:
    """Returns [N] numbers in (0, 1), one per key and position: splitmix64 (Steele et al., OOPSLA 2014) as a hash."""
    x = positions.astype(np.uint64)
    x += _ONE
    x *= _GOLDEN
    x += keys
    for shift, factor in _ROUNDS:
        x ^= x >> shift
        x *= factor
    x ^= x >> _LAST_SHIFT
    x >>= _UNUSED_BITS
    return (x.astype(np.float64) + 0.5) * 2.0**-53


class PlainSampler(Protocol):
    """Samples from softmax(logits / temperature) by inverse CDF."""

    def draw(
        self, logits: Tensor, temperature: FloatRows, uniform: NDArray[np.float64]
    ) -> tuple[Int64Array, FloatRows]:
        """Samples from logits [N, V]. temperature [N], 0 is greedy; uniform [N]. Returns tokens [N] and log-probs [N].

        A greedy token gets its log-prob at temperature 1.
        """


class KernelSampler:
    """Sampling by the C++ kernel, in one pass over float32 logits."""

    def __init__(self) -> None:
        self._library = kernels.load()
        self._scratch = np.zeros(0, np.float64)

    def draw(
        self, logits: Tensor, temperature: FloatRows, uniform: NDArray[np.float64]
    ) -> tuple[Int64Array, FloatRows]:
        count, vocab = len(temperature), logits.shape[1]
        if len(self._scratch) < vocab // 64 + 1:
            self._scratch = np.zeros(vocab // 64 + 1, np.float64)
        tokens, logprobs = np.empty(count, np.int64), np.empty(count, np.float32)
        arguments = kernels.Sampling(
            count, vocab, logits.stride(0), logits.data_ptr(), temperature.ctypes.data, uniform.ctypes.data,
            tokens.ctypes.data, logprobs.ctypes.data, self._scratch.ctypes.data,
        )  # fmt: skip
        self._library.sample(ctypes.byref(arguments))
        return tokens, logprobs


class TorchSampler:
    """Sampling by torch operations, on any device."""

    def draw(
        self, logits: Tensor, temperature: FloatRows, uniform: NDArray[np.float64]
    ) -> tuple[Int64Array, FloatRows]:
        scale = torch.from_numpy(temperature).to(logits.device)
        greedy = scale == 0
        logprobs = (logits.float() / scale.masked_fill(greedy, 1.0)[:, None]).log_softmax(-1)
        cdf = logprobs.double().exp().cumsum(-1)
        target = torch.from_numpy(uniform).to(logits.device)[:, None] * cdf[:, -1:]
        drawn = torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[1] - 1)[:, 0]
        tokens = torch.where(greedy, logits.argmax(-1), drawn)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        return tokens.cpu().numpy(), chosen.cpu().numpy()


class Draw:
    """Tokens to be sampled, with the data that is known before their logits."""

    def __init__(self, rows: Int64Array, indices: Int64Array, table: SequenceTable) -> None:
        """rows: [N] rows of the responses. indices: [N] index of each token in its response."""
        self.rows, self.indices = rows, indices
        self.uniform = draw_keyed_uniform(table.noise_key[rows], indices)
        self.temperature = table.temperature[rows]
        self.is_plain = not table.special[rows].any()
        self.guides = table.list_guides(rows)


def draw(logits: Tensor, wanted: Draw, table: SequenceTable, sampler: PlainSampler) -> tuple[Int64Array, FloatRows]:
    """Samples from logits [N, V], which it may overwrite.

    Returns tokens [N] and their log-probs [N] under the sampled distribution; the log-prob is NaN if a row's bias and
    penalties leave no distribution. If a row requests it, the log-probs of the unmodified logits are written to the
    table. Raises InterlaceError if the model's logits are not finite.
    """
    rows, indices, uniform, temperature = wanted.rows, wanted.indices, wanted.uniform, wanted.temperature
    if wanted.is_plain:
        guided = sampler.guided(wanted.guides) if wanted.guides and isinstance(sampler, FlowHead) else sampler
        tokens, logprobs = guided.draw(logits, temperature, uniform)
        _check_finite(logprobs)
        return tokens, logprobs
    logits = logits.float()  # Added biases would be lost in half precision.
    params = [table.occupant(row).request.params for row in rows]
    raw = [(at, logits[at].log_softmax(-1)) for at, own in enumerate(params) if own.raw_logprobs]
    has_distribution = np.ones(len(rows), np.bool_)
    reshaped = [at for at, own in enumerate(params) if reshapes_logits(own)]
    if reshaped:
        if not _are_drawable(logits[reshaped]).all():
            refuse_logits()
        for at in reshaped:
            row = rows[at]
            prompt, end = table.num_prompt[row], table.num_prompt[row] + indices[at]
            known = table.token_ids[row]
            logits[at] = reshape_logits(logits[at], params[at], known[:prompt], known[prompt:end])
        has_distribution[reshaped] = _are_drawable(logits[reshaped])
    is_cut = np.asarray([truncates(own) for own in params])
    cut, whole_rows = has_distribution & is_cut, has_distribution & ~is_cut
    tokens, logprobs = np.zeros(len(rows), np.int64), np.full(len(rows), np.nan, np.float32)
    if whole_rows.any():
        found = sampler.draw(logits[torch.from_numpy(whole_rows)], temperature[whole_rows], uniform[whole_rows])
        tokens[whole_rows], logprobs[whole_rows] = found
    if cut.any():
        chosen = [own for own, has_cut in zip(params, cut, strict=True) if has_cut]
        tokens[cut], logprobs[cut] = draw_truncated(logits[torch.from_numpy(cut)], chosen, uniform[cut])
    _check_finite(logprobs[has_distribution])
    for at, whole in raw:
        table.raw_logprobs[rows[at], table.num_prompt[rows[at]] + indices[at]] = float(whole[tokens[at]])
    return tokens, logprobs


def _are_drawable(logits: Tensor) -> BoolArray:
    """Returns [N], True for each row of logits [N, V] that is a distribution: only minus infinity may be infinite."""
    found: BoolArray = logits.amax(-1).isfinite().cpu().numpy()  # The maximum is NaN if one of them is.
    return found


def _check_finite(logprobs: FloatRows) -> None:
    if not np.isfinite(logprobs).all():
        refuse_logits()


def refuse_logits() -> NoReturn:
    """Raises InterlaceError for a model whose logits are not finite: further samples would silently be garbage."""
    raise InterlaceError(
        "the model's logits are not finite: its weights have probably diverged. Look at the last weight update"
        " (grad norm, learning rate), or load an earlier checkpoint."
    )
