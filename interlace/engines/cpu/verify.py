"""Checks of an engine on a model before it serves the model: correct logits, and bits independent of other rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from interlace.core.errors import UserError
from interlace.core.random import keyed_random
from interlace.engines.rollout.attention import INTERFACE, AttentionTraits
from interlace.engines.rollout.kv_store import KVStore
from interlace.engines.rollout.runner import Runner, StepTokens

Run = tuple[int, Sequence[int], int]
"""Row, tokens to run, position of the first."""
LONG, SHORT = 13, 6
"""Lengths of the two probe prompts, in tokens."""
NUM_OTHERS = (1, 2, 3, 4, 7, 16, 31, 63, 127)
"""Numbers of other rows that run in the same pass as the probed token."""
SURE_BYTES = 4
"""Smallest item size, in bytes, for which equal bits on a probe are evidence. In bfloat16, only few tokens reveal a
different order of summation."""
UNSURE = "no bit changed on a probe, but half precision rounds away most changes that other rows cause"


def probe_prompts(vocab_size: int) -> list[list[int]]:
    """Returns deterministic token ids for a probe."""
    draw = keyed_random("rollout probe")
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in (LONG, SHORT)]


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Computes the logits [L, vocabulary] of each prompt with the model's attention, alone and without a cache."""
    if model.config._attn_implementation == INTERFACE:  # An engine changed the attention earlier.
        model.set_attn_implementation("eager")
    return [
        model(input_ids=torch.tensor([list(prompt)], device=model.device), use_cache=False).logits[0].float()
        for prompt in prompts
    ]


def routing_fault(config: PretrainedConfig, traits: Sequence[AttentionTraits]) -> str | None:
    """Returns the reason why the calls of the attention interface cannot be all of the model's attention, or None."""
    text = config.get_text_config()
    if getattr(text, "is_causal", True) is False:
        return "its tokens attend in both directions"
    layers = int(text.num_hidden_layers)
    if len(traits) != layers:
        return f"{len(traits)} of its {layers} layers attend through transformers' attention interface"
    if getattr(text, "attention_chunk_size", None):
        return "its chunked attention lives in the attention mask alone"
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        whole = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
        kinds = [
            "sliding_attention" if whole and not any(trait.window for trait in traits) else "full_attention"
        ] * layers
    if any(kind == "sliding_attention" and not trait.window for kind, trait in zip(kinds, traits, strict=True)):
        return "its sliding window lives in the attention mask alone"
    return None


EIGHT_BITS_TOLERANCE = 2.0
"""Tolerance in nats for the mean over a token's distribution: rounding stays below it, products with a wrong weight
exceed it."""


class Probe:
    """Runs tokens through a runner directly, in separately reserved cells."""

    def __init__(self, runner: Runner, store: KVStore, max_rows: int, *, tokens: int = LONG) -> None:
        """tokens: the longest sequence of the probe."""
        self._runner, self._store, self._spare_row = runner, store, max_rows
        self.rows = [row for row in range(max_rows) if store.reserve(row, tokens)]
        if not self.rows:
            raise UserError(
                f"max_tokens={store.num_cells} holds no sequence of {tokens} tokens. Raise it to at least 16."
            )

    def close(self) -> None:
        for row in self.rows:
            self._store.free(row)

    @torch.inference_mode()
    def run(self, *runs: Run) -> Tensor:
        """Runs one forward pass. Returns logits [tokens, vocabulary] of all tokens, in order."""
        tokens = np.concatenate([np.asarray(ids, np.int64) for _, ids, _ in runs])
        rows = np.concatenate([np.full(len(ids), row, np.int64) for row, ids, _ in runs])
        positions = np.concatenate([np.arange(start, start + len(ids)) for _, ids, start in runs])
        logits = self._runner.start(StepTokens(tokens, rows, positions, np.arange(len(tokens))))
        return logits()[: len(tokens)].float().clone()

    def length_fault(self, prompt: Sequence[int], expected: Tensor, at: int) -> str | None:
        """Compares the engine with the model on a prompt that is longer than `at`, a length at which the computation
        changes.

        The prompt runs after another row's tokens, so that a token's index in the pass differs from its position. From
        two tokens before the change, each token runs alone. Returns None if the log-probs agree.
        """
        row, first = self.rows[-1], max(1, min(at - 2, len(prompt)))
        head: list[Run] = [(row, prompt[:first], 0)]
        if row != self.rows[0]:
            head.insert(0, (self.rows[0], prompt[:SHORT], 0))
        got = [self.run(*head)[-first:]]
        got += [self.run((row, prompt[place : place + 1], place)) for place in range(first, len(prompt))]
        return self._describe_difference([torch.cat(got)], [expected])

    def logits_fault(self, prompts: Sequence[Sequence[int]], expected: Sequence[Tensor]) -> str | None:
        """Compares packed, chunked and token-by-token passes with the model. Returns None if the log-probs agree."""
        (long, short), got = prompts, []
        for a, b, c, d in ((0, 9, 0, 4), (9, 12, 4, 5), (12, 13, 5, 6)):
            first, second = (self.rows[0], long[a:b], a), (self.rows[-1], short[c:d], c)
            got.append(self.run(first, second).split([b - a, d - c]) if len(self.rows) > 1 else (self.run(first),))
        return self._describe_difference([torch.cat(parts) for parts in zip(*got, strict=True)], expected)

    def _describe_difference(self, packed: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
        in_eight_bits = getattr(self._runner, "in_eight_bits", False)
        worst = max(_measure_gap(*each, weighted=in_eight_bits) for each in zip(packed, expected, strict=False))
        # NaN fails the comparison too. Half precision rounds differently in every order of summation.
        tolerance = 1e-4 if self._runner.dtype == torch.float32 else 0.2
        if in_eight_bits:
            tolerance = EIGHT_BITS_TOLERANCE
        return None if worst <= tolerance else f"its log-probs differ from the model's own by {worst:.2g}"

    def invariance_fault(self, prompt: Sequence[int]) -> str | None:
        """Runs one token after a prefix together with other rows. Returns None if its bits are equal each time."""
        last = len(prompt) - 1
        target: Run = (0, prompt[last:], last)
        expected = self.run((0, prompt, 0))[-1]
        self.run((0, prompt[:last], 0))
        if not torch.equal(self.run(target)[0], expected):
            return "a prompt run whole and one run in chunks differ in bits"
        others: list[Run] = [(row, [prompt[row % last]], 0) for row in self.rows[1:]]
        for count in NUM_OTHERS:
            if count > len(others):
                break
            first, final = self.run(target, *others[:count])[0], self.run(*others[:count], target)[-1]
            if not (torch.equal(first, expected) and torch.equal(final, expected)):
                return f"a row's logits change in bits beside {count} other rows"
        for count in (3, 15):  # The spare row lets a store of a single sequence run long prompts too.
            if not torch.equal(self.run((self._spare_row, [*prompt, *prompt][:count], 0), target)[-1], expected):
                return f"a row's logits change in bits beside a prompt of {count} tokens"
        if self._runner.dtype.itemsize < SURE_BYTES:
            return UNSURE
        return None


def _measure_gap(ours: Tensor, theirs: Tensor, *, weighted: bool) -> float:
    """Returns the largest difference of log-probs; if weighted, of their mean over each token's distribution."""
    own, expected = ours.log_softmax(-1), theirs.log_softmax(-1)
    gap = (own - expected).abs()
    return float((gap * expected.exp()).sum(-1).max() if weighted else gap.max())
