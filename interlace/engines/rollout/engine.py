"""The native rollout engine: continuous batching for any transformers causal LM, in this process."""

import ctypes
import time
from collections.abc import Mapping
from collections.abc import Sequence as Series
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from interlace.core.errors import UserError
from interlace.core.types import Completion, FinishReason, Metrics, Request, SamplingParams
from interlace.engines.rollout import kernels
from interlace.engines.rollout.counters import Counters
from interlace.engines.rollout.decoder import DecoderRunner, Until
from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.limits import Limits
from interlace.engines.rollout.live_weights import LiveWeights
from interlace.engines.rollout.options import EngineOptions
from interlace.engines.rollout.prefix import PrefixIndex
from interlace.engines.rollout.protocol import EngineMemory, EngineReport, StepOutput, SwitchMode, UpdateMode
from interlace.engines.rollout.sampling import (
    Draw,
    FloatRows,
    KernelSampler,
    PlainSampler,
    TorchSampler,
    draw,
    refuse_logits,
)
from interlace.engines.rollout.saved_weights import SavedWeights
from interlace.engines.rollout.scheduler import Plan, Scheduler
from interlace.engines.rollout.sequence import Sequence, SequenceTable
from interlace.engines.rollout.serving import ServingConfig, serve
from interlace.engines.rollout.speculative import Speculator
from interlace.models.size import context_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_LOOK_S = 10e-3
"""Several steps between two looks at the queue begin within this time; who cannot wait calls interrupt()."""


class NativeEngine:
    """One model serving requests. It takes the model over: nobody else may run or train that object.

    Not thread-safe: one caller at a time. Engines and other models in the same process do not disturb each other.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        max_running: int = 64,
        max_tokens: int = 65536,
        max_batch_tokens: int = 2048,
        seed: int = 0,
        options: EngineOptions | None = None,
    ) -> None:
        """Prepares the model and checks, on it, what report() then says.

        tokenizer: for stop strings; loaded along where the model is a path. max_running: sequences at once.
        max_tokens: cells of the KV store. max_batch_tokens: of one forward pass; longer prompts are run in chunks.
        seed: of the sampling noise.
        """
        options = options or EngineOptions()
        torch.set_num_threads(options.num_threads)
        self._model, self._tokenizer = _load(model, tokenizer)
        context = context_length(self._model.config) or max_tokens
        config = ServingConfig(max_running=max_running, max_tokens=max_tokens, longest=context, options=options)
        serving = serve(self._model, config)
        self._runner, self._attention, self._pool = serving.runner, serving.attention, serving.pool
        self._store, self._report = serving.store, serving.report
        self._weights = LiveWeights(self._model)
        self._table = SequenceTable(max_running, seed)
        spare_rows = range(max_running + 1, max_running + 1 + config.num_retained) if options.prefix_cache else ()
        routed = self._attention is not None
        self._prefixes = PrefixIndex(self._table, self._store, enabled=routed, spare_rows=spare_rows)
        self._scheduler = Scheduler(self._table, self._store, self._prefixes, max_batch_tokens=max_batch_tokens)
        self._sampler: PlainSampler = KernelSampler() if serving.compiled else TorchSampler()
        self._limits = Limits(
            context=context, longest=self._store.longest, vocab_size=self._model.config.get_text_config().vocab_size,
            has_tokenizer=self._tokenizer is not None,
        )  # fmt: skip
        self._decoder = self._runner if isinstance(self._runner, DecoderRunner) else None
        most = options.draft_tokens if routed else 0
        self._speculator = Speculator(self._table, most=most, below=options.draft_below)
        self._steps_per_schedule = options.steps_per_schedule
        self._live: dict[str, Sequence] = {}
        self._arrivals = self._version = 0
        self._paused, self._interrupted = False, ctypes.c_int64(0)
        self._saved: dict[int, list[Tensor]] | None = None
        self._counters = Counters()

    @property
    def version(self) -> int:
        return self._version

    def generate(
        self, prompts: Series[Series[int]], params: SamplingParams | Series[SamplingParams]
    ) -> list[Completion]:
        """Runs prompts (token ids) to the end and returns their completions in the order given.

        The noise is keyed by a prompt's place in the list: the same call gives the same tokens.
        """
        if self._live:
            raise UserError("generate() needs the engine to itself, and requests are live: drain or abort them first.")
        if self._paused or self._saved is not None:
            raise UserError("generate() would wait for ever: the engine is paused or offloaded.")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(
                f"generate() got {len(prompts)} prompts but {len(each)} sampling parameters: give one, or one a prompt."
            )
        requests = [
            Request(uid="generate", sample_index=index, prompt_ids=prompt, params=own)
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]
        done: dict[str, Completion] = {}
        try:
            for request in requests:
                self.submit(request)
            while self._live:
                done.update((completion.request.id, completion) for completion in self.step().finished)
        finally:
            self.abort()
        return [done[request.id] for request in requests]

    def submit(self, request: Request) -> None:
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already live")
        self._limits.check(request)
        prompt = [int(token) for token in request.prompt_ids]
        limit = min(len(prompt) + request.params.max_new_tokens, self._limits.context)
        sequence = Sequence(
            request=request, arrival=self._arrivals, limit=limit, token_ids=prompt + list(request.generated_ids),
            logprobs=list(request.generated_logprobs), versions=list(request.generated_versions),
            raw_logprobs=list(request.generated_raw_logprobs),
        )  # fmt: skip
        self._arrivals += 1
        self._live[request.id] = sequence
        self._scheduler.add(sequence)

    def step(self) -> StepOutput:
        finished: list[Completion] = []
        new_tokens, preemptions = 0, self._scheduler.num_preemptions
        if self._live and not self._paused and self._saved is None:
            new_tokens = self._advance(finished)
        self._interrupted.value = 0
        return StepOutput(
            finished=tuple(finished),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_new_tokens=new_tokens,
            kv_use=self._kv_use(),
            num_preemptions=self._scheduler.num_preemptions - preemptions,
        )

    def interrupt(self) -> None:
        self._interrupted.value = 1

    def abort(self, ids: Series[str] | None = None) -> tuple[Completion, ...]:
        wanted = list(self._live) if ids is None else [name for name in dict.fromkeys(ids) if name in self._live]
        return tuple(self._end(self._live[name], FinishReason.ABORTED) for name in wanted)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def update_weights(
        self, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode, *, frozen: bool = False
    ) -> None:
        _check_mode(mode)
        self._weights.update(tensors, frozen=frozen)
        self._updated(version, mode)

    def load(self, folder: str | Path, version: int, mode: UpdateMode) -> None:
        _check_mode(mode)
        saved = SavedWeights(folder)
        if saved.shapes.keys() <= self._weights.names:
            self._weights.check(saved.shapes, lambda one, other: torch.equal(saved.read(one), saved.read(other)))
            for name, tensor in saved:
                self._weights.replace(name, tensor, frozen=False)
        else:  # transformers saves some architectures under other names: it knows the way back
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=self._model.dtype)
            self._weights.update(loaded.state_dict(), frozen=True)
        self._updated(version, mode)

    def _updated(self, version: int, mode: UpdateMode) -> None:
        """What follows once the weights are new."""
        self._runner.rebind()
        self._version = version
        if mode == "recompute":
            self._forget_computed()
        self._prefixes.clear()

    def onload(self) -> None:
        if self._saved is None:
            return
        self._weights.residence.onload()
        self._pool.allocate()
        self._runner.rebind()
        for row, content in self._saved.items():
            self._pool.write(self._store.cells(row, int(self._table.num_computed[row])), content)
        self._saved = None

    def offload(self, kv: SwitchMode = "offload") -> None:
        if self._saved is not None:
            return
        self._prefixes.clear()
        if kv == "recompute":
            self._scheduler.forget_computed()
        rows = [sequence.row for sequence in self._scheduler.running]
        self._saved = {row: self._pool.read(self._store.cells(row, int(self._table.num_computed[row]))) for row in rows}
        self._pool.release()
        self._weights.residence.offload()

    def memory(self) -> EngineMemory:
        return EngineMemory(weights=self._weights.num_bytes, kv_cache=self._pool.num_bytes)

    def metrics(self) -> Metrics:
        held = {"kv_use": self._kv_use(), "kv_free_tokens": float(self._store.num_free)}
        attention_s = self._attention.seconds if self._attention is not None else 0.0
        return self._counters.read(self._scheduler, self._prefixes.num_reused_tokens, attention_s) | held

    def report(self) -> EngineReport:
        return self._report

    def _kv_use(self) -> float:
        """Share of the cells that running sequences hold; what ended ones left for reuse is free to be taken."""
        return self._store.held(self._scheduler.running_rows()) / self._store.num_cells

    def _forget_computed(self) -> None:
        self._scheduler.forget_computed()
        if self._saved is not None:
            self._saved = {}

    def _advance(self, finished: list[Completion]) -> int:
        """One look at the queue and the forward passes until the next. Returns the number of tokens drawn."""
        start = time.perf_counter()
        most = self._speculator.guess(self._scheduler.running) or self._steps_per_schedule
        if self._speculator.has_guessed:
            self._scheduler.drop_plan()
        plan = self._scheduler.schedule(min(most, self._steps_per_schedule))
        self._counters.schedule_s += time.perf_counter() - start
        if not len(plan.rows):
            return 0
        if self._speculator.has_guessed:
            drawn = self._run(plan, finished)
            self._speculator.judge(max(0, drawn - len(plan.rows)))
            return drawn
        if self._decoder and plan.all_decode and not self._table.num_unusual:
            drawn = self._decode(self._decoder, plan, finished)
        else:
            drawn = self._run(plan, finished)
            for _ in range(plan.steps - 1):
                if finished or self._interrupted.value or time.perf_counter() - start >= MAX_LOOK_S:
                    break
                drawn += self._run(plan, finished)
        self._speculator.wait(drawn)
        return drawn

    @torch.inference_mode()
    def _run(self, plan: Plan, finished: list[Completion]) -> int:
        """One forward pass, and tokens for each row whose last token ran. Returns how many."""
        table, start = self._table, time.perf_counter()
        if plan.all_decode:
            rows = sampled = plan.rows
            positions, wanted = table.num_computed[rows], np.arange(len(rows))
        else:
            rows, ends = np.repeat(plan.rows, plan.counts), np.cumsum(plan.counts)
            begins = table.num_computed[plan.rows]
            positions = np.arange(len(rows)) - np.repeat(ends - plan.counts - begins, plan.counts)
            # A row whose last token runs gets that token's logits, and those of the drafts behind it.
            last = np.repeat(table.num_tokens[plan.rows] - 1, plan.counts)
            wanted = np.flatnonzero(positions >= last)
            sampled = rows[wanted]
        logits = self._runner.start(table.token_ids[rows, positions], rows, positions, wanted)
        # While it runs, all that does not depend on the tokens to come.
        places = positions[wanted] + 1
        tokens_to_draw = Draw(sampled, places - table.num_prompt[sampled], table)
        if not self._speculator.has_guessed:
            self._scheduler.prepare(plan)
        found = logits()
        table.num_computed[plan.rows] += plan.counts
        middle = time.perf_counter()
        drawn = self._sample(found[: len(sampled)], tokens_to_draw, places, finished) if len(sampled) else 0
        self._counters.count(
            tokens=len(rows), sampled=len(sampled), forward_s=middle - start, sample_s=time.perf_counter() - middle
        )
        return drawn

    def _decode(self, decoder: DecoderRunner, plan: Plan, finished: list[Completion]) -> int:
        """As _run, where each row runs its last token and draws plainly: all the plan's passes in one call.

        Where somebody waits for a row, the first that ends ends the call.
        """
        start = time.perf_counter()
        self._scheduler.prepare(plan)
        goes_past = not self._scheduler.waiting
        until = Until(plan.steps, MAX_LOOK_S, past_ends=goes_past, interrupted=ctypes.addressof(self._interrupted))
        made = decoder.advance(plan.rows, self._table, self._version, until)
        if any(outcome == kernels.NOT_FINITE for _, outcome in made.ended):
            refuse_logits()  # before anybody is let go: what all have is still there to be taken out
        for place, outcome in made.ended:
            self._finish(int(plan.rows[place]), finished, stopped=outcome == kernels.STOPPED)
        self._counters.count(
            steps=made.num_steps,
            tokens=made.num_drawn,
            sampled=made.num_drawn,
            forward_s=made.forward_s,
            sample_s=time.perf_counter() - start - made.forward_s,
        )
        return made.num_drawn

    def _sample(self, logits: Tensor, wanted: Draw, places: Int64Array, finished: list[Completion]) -> int:
        """Draws the tokens that come at `places` and keeps those whose predecessors were right. Returns how many."""
        table, rows = self._table, wanted.rows
        tokens, logprobs = draw(logits, wanted, table, self._sampler)
        if not self._speculator.has_guessed:
            self._append(rows, tokens, logprobs, finished)
            return len(rows)
        kept = 0
        for row in np.unique(rows):
            mine = np.flatnonzero(rows == row)
            drafts = table.token_ids[row, places[mine[1:]] - 1]
            right = int(np.argmin(np.r_[drafts == tokens[mine[:-1]], False]))
            table.num_drafts[row], table.num_computed[row] = 0, places[mine[right]]
            self._counters.count_drafts(len(drafts), right)
            for at in mine[: right + 1]:
                kept += 1
                if self._append(rows[at : at + 1], tokens[at : at + 1], logprobs[at : at + 1], finished):
                    break
        return kept

    def _append(self, rows: Int64Array, tokens: Int64Array, logprobs: FloatRows, finished: list[Completion]) -> bool:
        """Adds one token to each row and ends those that are done. Returns whether any is."""
        table = self._table
        table.append(rows, tokens, logprobs, self._version)
        stopped = (tokens[:, None] == table.stop_ids[rows]).any(1)
        if table.stops_on_text[rows].any():
            stopped |= np.asarray([self._stops_on_text(int(row)) for row in rows])
        ended = stopped | (table.num_tokens[rows] >= table.limit[rows])
        if not ended.any():
            return False
        for at in np.flatnonzero(ended):
            self._finish(int(rows[at]), finished, stopped=bool(stopped[at]))
        return True

    def _finish(self, row: int, finished: list[Completion], *, stopped: bool) -> None:
        """Ends the sequence in a row; later ones may draft from it."""
        sequence = self._table.occupant(row)
        self._speculator.observe(sequence)
        finished.append(self._end(sequence, FinishReason.STOP if stopped else FinishReason.LENGTH))

    def _stops_on_text(self, row: int) -> bool:
        """Whether the end of a row's response, decoded, contains one of its stop strings."""
        table, stops = self._table, self._table.params(row).stop
        if not stops or self._tokenizer is None:
            return False
        # A token can be a quarter of a character, and the first decoded one may be a fragment.
        first = max(int(table.num_tokens[row]) - 4 * max(map(len, stops)) - 8, int(table.num_prompt[row]))
        text = self._tokenizer.decode(table.token_ids[row, first : table.num_tokens[row]].tolist())
        return any(stop in text for stop in stops)

    def _end(self, sequence: Sequence, reason: FinishReason) -> Completion:
        """Takes a sequence out for good."""
        if self._saved is not None:
            self._saved.pop(sequence.row, None)
        self._scheduler.remove(sequence)
        del self._live[sequence.request.id]
        return Completion(
            request=sequence.request,
            token_ids=tuple(sequence.token_ids[sequence.num_prompt :]),
            logprobs=tuple(sequence.logprobs),
            versions=tuple(sequence.versions),
            finish_reason=reason,
            raw_logprobs=tuple(sequence.raw_logprobs),
        )


def _check_mode(mode: str) -> None:
    if mode not in ("keep", "recompute"):
        raise UserError(f"unknown weight update mode {mode!r}. Known: keep, recompute.")


def _load(
    model: PreTrainedModel | str | Path, tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[PreTrainedModel, "PreTrainedTokenizerBase | None"]:
    if isinstance(model, PreTrainedModel):
        return model.eval(), tokenizer
    return AutoModelForCausalLM.from_pretrained(model).eval(), tokenizer or AutoTokenizer.from_pretrained(model)
