"""Forward passes between two checks of an engine's queue, and sampling of their tokens."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from interlace.core.types import FinishReason, Inputs, Metrics
from interlace.engines.cpu import kernels
from interlace.engines.cpu.decoder import DecoderRunner, StopRule
from interlace.engines.rollout.agreement import Agreement
from interlace.engines.rollout.attention import KernelAttention
from interlace.engines.rollout.config import NativeConfig
from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.prepare_model import PreparedModel
from interlace.engines.rollout.runner import Given, StepTokens
from interlace.engines.rollout.sampling import (
    Draw,
    FloatRows,
    KernelSampler,
    PlainSampler,
    TorchSampler,
    draw,
    refuse_logits,
)
from interlace.engines.rollout.scheduler import Plan, Scheduler
from interlace.engines.rollout.sequence import SequenceTable
from interlace.engines.rollout.speculative import Speculator
from interlace.engines.rollout.stop_strings import ends_with_text
from interlace.models.action_head import head_of
from interlace.models.inputs import InputEmbedding, input_embedding
from interlace.models.loading import count_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_ROWS = np.zeros(0, np.int64)
BLOCK = 16
"""Observations embedded in one call. Smaller batches are padded to this number: all calls have one shape, so the other
observations of a call do not change the bits of a row."""
MAX_LOOK_S = 10e-3
"""Limit within which all steps between two checks of the queue begin; a caller that cannot wait interrupts."""
Serving: TypeAlias = Callable[[int | None], AbstractContextManager[int]]
NO_DISTRIBUTION = (
    "its sampling parameters leave no distribution to sample from: with its bias and penalties the logits are not "
    "finite numbers. Reduce logit_bias, repetition_penalty and presence_penalty"
)
"""Failure of a sequence whose reshaped logits are not finite, although the model's logits are finite."""


@dataclass(frozen=True, slots=True)
class EndedRow:
    """A row whose sequence ended."""

    row: int
    reason: FinishReason
    """`stop` after a stop token or string, `length` at the limit, `aborted` after a failure."""
    failure: str = ""


class DecodeLoop:
    """Executor of the scheduler's plans, which appends the sampled tokens to the table's rows."""

    def __init__(
        self,
        serving: PreparedModel,
        table: SequenceTable,
        scheduler: Scheduler,
        tokenizer: "PreTrainedTokenizerBase | None",
        config: NativeConfig,
        agreement: Agreement,
    ) -> None:
        """tokenizer: for stop strings."""
        self._agreement = agreement
        self._runner, self._table, self._scheduler, self._tokenizer = serving.runner, table, scheduler, tokenizer
        reads = input_embedding(serving.model.config)
        self._embedder = None if reads is None else InputEmbedder(serving.model, reads, table)
        self._decoder = serving.runner if isinstance(serving.runner, DecoderRunner) else None
        own = head_of(serving.model)
        self._sampler: PlainSampler = own or (
            KernelSampler() if isinstance(serving.attention, KernelAttention) else TorchSampler()
        )
        most = config.draft_tokens if serving.attention is not None else 0
        self._speculator = Speculator(table, most=most, below=config.draft_below)
        self.num_drawable = None if own or tokenizer is None else count_ids(tokenizer)
        """Number of ids that are sampled, from 0: embeddings beyond the tokenizer's last token have no text."""
        if self._decoder and self.num_drawable:
            self._decoder.limit_drawn(self.num_drawable)
        self._steps_per_schedule, self._version = config.steps_per_schedule, 0
        self._ended: list[EndedRow] = []
        self.counters = Counters()
        self.interrupted = ctypes.c_int64(0)
        """Flag, 1 while a caller waits for the next check of the queue."""

    def advance(self, serving: Serving, *, several: bool) -> tuple[int, list[EndedRow]]:
        """Checks the queue once and runs the forward passes until the next check.

        serving: context manager that installs the weights of a version (None: the newest) and yields the version's
        number. several: True if sequences of several versions are live; each version's sequences then run separately.
        Returns the number of sampled tokens and the ended rows; a row stays occupied until the scheduler removes its
        sequence.
        """
        self._ended = []
        start = time.perf_counter()
        most = (
            self._speculator.guess(_NO_ROWS if several else self._scheduler.running_rows()) or self._steps_per_schedule
        )
        if self._speculator.has_guessed:
            self._scheduler.drop_plan()
        plan = self._scheduler.schedule(min(most, self._steps_per_schedule))
        self.counters.count_schedule(time.perf_counter() - start)
        drawn = 0
        for version, part in self._by_version(plan) if several else ((None, plan),):
            with serving(version) as self._version:
                drawn += self._run_part(part) if len(part.rows) else 0
        return drawn, self._ended

    def _by_version(self, plan: Plan) -> Iterator[tuple[int | None, Plan]]:
        versions = [self._table.occupant(row).version for row in plan.rows.tolist()]
        for version in dict.fromkeys(versions):
            mine = np.asarray([other == version for other in versions])
            yield version, replace(plan, rows=plan.rows[mine], counts=plan.counts[mine])

    def _run_part(self, plan: Plan) -> int:
        """Runs the rows of one version until the next check. Returns the number of sampled tokens."""
        start, num_ended = time.perf_counter(), len(self._ended)
        if self._speculator.has_guessed:
            drawn = self._run_pass(plan)
            self._speculator.judge(max(0, drawn - len(plan.rows)))
            return drawn
        if self._decoder and plan.all_decode and not self._table.num_unusual:
            drawn = self._decode_plan(self._decoder, plan)
        else:
            drawn = self._run_pass(plan)
            for _ in range(plan.steps - 1):
                is_due = bool(self.interrupted.value) or time.perf_counter() - start >= MAX_LOOK_S
                if len(self._ended) > num_ended or self._agreement.decide(is_due):
                    break
                drawn += self._run_pass(plan)
        self._speculator.wait(drawn)
        return drawn

    @torch.inference_mode()
    def _run_pass(self, plan: Plan) -> int:
        """Runs one forward pass, and samples a token for each row whose last token ran. Returns their number."""
        table, start = self._table, time.perf_counter()
        if plan.all_decode:
            rows = sampled = plan.rows
            positions, wanted = table.num_computed[rows], np.arange(len(rows))
        else:
            rows, ends = np.repeat(plan.rows, plan.counts), np.cumsum(plan.counts)
            begins = table.num_computed[plan.rows]
            positions = np.arange(len(rows)) - np.repeat(ends - plan.counts - begins, plan.counts)
            # A row whose last token runs needs the logits of that token and of the drafts after it.
            last = np.repeat(table.num_tokens[plan.rows] - 1, plan.counts)
            wanted = np.flatnonzero(positions >= last)
            sampled = rows[wanted]
        token_ids = table.token_ids[rows, positions]
        embedder = self._embedder if table.num_with_inputs else None
        given = None if embedder is None else embedder.given(rows, positions, token_ids)
        logits = self._runner.start(StepTokens(token_ids, rows, positions, wanted, given))
        # During the pass, do all work that does not depend on its tokens.
        places = positions[wanted] + 1
        tokens_to_draw = Draw(sampled, places - table.num_prompt[sampled], table)
        if not self._speculator.has_guessed:
            self._scheduler.prepare(plan)
        found = logits()
        table.num_computed[plan.rows] += plan.counts
        middle = time.perf_counter()
        drawn = self._sample_tokens(found[: len(sampled)], tokens_to_draw, places) if len(sampled) else 0
        self.counters.count(
            tokens=len(rows), sampled=len(sampled), forward_s=middle - start, sample_s=time.perf_counter() - middle
        )
        return drawn

    def _decode_plan(self, decoder: DecoderRunner, plan: Plan) -> int:
        """Runs all passes of the plan in one call, if each row runs its last token and samples without special
        parameters.

        If a sequence waits for a row, the call ends with the first row that ends.
        """
        start = time.perf_counter()
        self._scheduler.prepare(plan)
        goes_past = not self._scheduler.waiting
        until = StopRule(plan.steps, MAX_LOOK_S, past_ends=goes_past, interrupted=ctypes.addressof(self.interrupted))
        made = decoder.advance(plan.rows, self._table, self._version, until)
        if any(outcome == kernels.NOT_FINITE for _, outcome in made.ended):
            refuse_logits()  # Before any row is removed: the tokens of all rows can still be collected.
        for place, outcome in made.ended:
            self._finish_row(int(plan.rows[place]), stopped=outcome == kernels.STOPPED)
        self.counters.count(
            steps=made.num_steps,
            tokens=made.num_drawn,
            sampled=made.num_drawn,
            forward_s=made.forward_s,
            sample_s=time.perf_counter() - start - made.forward_s,
        )
        return made.num_drawn

    def _sample_tokens(self, logits: Tensor, wanted: Draw, places: Int64Array) -> int:
        """Samples the tokens at `places` and keeps those after right guesses. Returns their number."""
        table, rows = self._table, wanted.rows
        tokens, logprobs = draw(logits[:, : self.num_drawable], wanted, table, self._sampler)
        at_once = table.at_once[rows]
        if not self._speculator.has_guessed and not at_once.any():
            self._append_tokens(rows, tokens, logprobs)
            return len(rows)
        kept = self._append_at_once(rows[at_once], tokens[at_once], logprobs[at_once])
        for row in np.unique(rows[~at_once]):
            mine = np.flatnonzero(rows == row)
            drafts = table.token_ids[row, places[mine[1:]] - 1]
            right = int(np.argmin(np.r_[drafts == tokens[mine[:-1]], False]))
            table.num_drafts[row], table.num_computed[row] = 0, places[mine[right]]
            self.counters.count_drafts(len(drafts), right)
            for at in mine[: right + 1]:
                kept += 1
                if self._append_tokens(rows[at : at + 1], tokens[at : at + 1], logprobs[at : at + 1]):
                    break
        return kept

    def _append_at_once(self, rows: Int64Array, tokens: Int64Array, logprobs: FloatRows) -> int:
        """Adds all tokens of each row, which are adjacent in `rows`, and ends the row. Returns the number of tokens."""
        begins = np.ones(len(rows) + 1, bool)
        begins[1:-1] = rows[1:] != rows[:-1]
        bounds = np.flatnonzero(begins)
        for start, end in pairwise(bounds.tolist() if len(rows) else ()):
            row = int(rows[start])
            if not np.isfinite(logprobs[start:end]).all():
                self._fail_row(row)
                continue
            self._table.append_all(row, tokens[start:end], logprobs[start:end], self._version)
            self._finish_row(row, stopped=False)
        return len(rows)

    def _append_tokens(self, rows: Int64Array, tokens: Int64Array, logprobs: FloatRows) -> bool:
        """Adds one token to each row and ends the finished rows. Returns True if a row ended."""
        table = self._table
        failed = ~np.isfinite(logprobs)
        if failed.any():
            for row in rows[failed]:
                self._fail_row(int(row))
            self._append_tokens(rows[~failed], tokens[~failed], logprobs[~failed])
            return True
        table.append(rows, tokens, logprobs, self._version)
        stopped = (tokens[:, None] == table.stop_ids[rows]).any(1)
        if table.stops_on_text[rows].any():
            stopped |= np.asarray([self._stops_on_text(int(row)) for row in rows])
        done = stopped | (table.num_tokens[rows] >= table.limit[rows])
        if not done.any():
            return False
        for at in np.flatnonzero(done):
            self._finish_row(int(rows[at]), stopped=bool(stopped[at]))
        return True

    def _finish_row(self, row: int, *, stopped: bool) -> None:
        """Records that a row ended; later rows may draft from it."""
        self._speculator.observe(row)
        self._ended.append(EndedRow(row, FinishReason.STOP if stopped else FinishReason.LENGTH))

    def _fail_row(self, row: int) -> None:
        """Records that a row ends without another token, because its sampling parameters leave no distribution."""
        self._ended.append(EndedRow(row, FinishReason.ABORTED, NO_DISTRIBUTION))

    def _stops_on_text(self, row: int) -> bool:
        """Returns True if the decoded end of a row's response contains one of its stop strings."""
        table, stops = self._table, self._table.occupant(row).request.params.stop
        if not stops or self._tokenizer is None:
            return False
        response = table.token_ids[row, table.num_prompt[row] : table.num_tokens[row]]
        return ends_with_text(response, stops, self._tokenizer)


class Counters:
    """Counts of tokens, passes and seconds, read as sums since the last read."""

    def __init__(self) -> None:
        names = ("num_steps", "decode_tokens", "prefill_tokens", "draft_tokens", "accepted")
        self._totals = dict.fromkeys((*names, "schedule_s", "forward_s", "sample_s"), 0.0)
        self._before: dict[str, float] = {}
        """Totals at the last read."""
        self._read_s = time.perf_counter()

    def count(self, *, tokens: int, sampled: int, forward_s: float, sample_s: float, steps: int = 1) -> None:
        self._add(num_steps=steps, decode_tokens=sampled, prefill_tokens=tokens - sampled)
        self._add(forward_s=forward_s, sample_s=sample_s)

    def count_schedule(self, seconds: float) -> None:
        self._add(schedule_s=seconds)

    def count_drafts(self, proposed: int, accepted: int) -> None:
        self._add(draft_tokens=proposed, accepted=accepted)

    def read(self, scheduler: Scheduler, reused: int, attention_s: float) -> Metrics:
        """Returns rates and sums since the last call. attention_s, reused: totals since the engine's start."""
        totals = self._totals | {"num_preemptions": scheduler.num_preemptions, "planned_ahead": scheduler.num_prepared}
        totals |= {"reused_tokens": reused, "attention_s": attention_s}
        sums = {name: float(total - self._before.get(name, 0.0)) for name, total in totals.items()}
        elapsed = max(time.perf_counter() - self._read_s, 1e-9)
        self._before, self._read_s = totals, time.perf_counter()
        rates = {f"{name}_per_s": sums[name] / elapsed for name in ("decode_tokens", "prefill_tokens")}
        rates["draft_acceptance"] = sums.pop("accepted") / max(sums["draft_tokens"], 1)
        return (
            {"num_running": float(len(scheduler.running)), "num_waiting": float(len(scheduler.waiting))} | sums | rates
        )

    def _add(self, **counts: float) -> None:
        for name, count in counts.items():
            self._totals[name] += count


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
    padded = {name: _pad_block(array).to(model.device) for name, array in arrays.items()}
    body: Any = model.base_model  # transformers' stub lacks embed_inputs
    blocks = [
        body.embed_inputs({name: tensor[start : start + BLOCK] for name, tensor in padded.items()})
        for start in range(0, count, BLOCK)
    ]
    return torch.cat(blocks)[:count].flatten(0, 1)


def _pad_block(array: NDArray[Any]) -> Tensor:
    """Appends zeros to [N, ...] up to a multiple of BLOCK."""
    padded = np.zeros((len(array) + -len(array) % BLOCK, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return torch.from_numpy(padded)
