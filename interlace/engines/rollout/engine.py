"""The native rollout engine: continuous batching for any transformers causal LM, in this process."""

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
from interlace.engines.rollout.attention import AttentionBackend, KernelAttention, TorchAttention
from interlace.engines.rollout.kv_store import Int64Array, KVPool, SlotStore
from interlace.engines.rollout.live_weights import LiveWeights
from interlace.engines.rollout.model_setup import route_attention
from interlace.engines.rollout.prefix import PrefixIndex
from interlace.engines.rollout.protocol import EngineMemory, EngineReport, StepOutput, UpdateMode
from interlace.engines.rollout.runner import ModelRunner
from interlace.engines.rollout.sampling import KernelSampler, PlainSampler, TorchSampler, check_finite, keyed_uniform
from interlace.engines.rollout.scheduler import Plan, Scheduler
from interlace.engines.rollout.sequence import Sequence, SequenceTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    ) -> None:
        """max_tokens: cells of the KV store. max_batch_tokens: tokens of one forward pass. seed: of the sampling noise.

        tokenizer: needed by stop strings only; loaded along where the model is a path.
        """
        self._model, self._tokenizer = _load(model, tokenizer)
        self._context = int(getattr(self._model.config.get_text_config(), "max_position_embeddings", 0) or max_tokens)
        routed = route_attention(self._model)
        self._weights = LiveWeights(self._model)
        self._pool = KVPool(routed.shapes, max_tokens + 16, self._model.dtype, self._model.device)
        self._store = SlotStore(self._pool, max_running + 1, max_tokens)
        self._store.page_table[max_running] = max_tokens  # the spare row: where padding writes
        self._table = SequenceTable(max_running, seed)
        self._prefixes = PrefixIndex(self._table, self._store)
        self._scheduler = Scheduler(self._table, self._store, self._prefixes, max_batch_tokens=max_batch_tokens)
        self._attention = _attention(self._pool, self._store, self._longest)
        self._sampler: PlainSampler = (
            KernelSampler() if isinstance(self._attention, KernelAttention) else TorchSampler()
        )
        self._runner = ModelRunner(self._model, routed.hub, self._attention, max_running)
        self._live: dict[str, Sequence] = {}
        self._arrivals = 0
        self._version = 0
        self._paused = False
        self._saved: dict[int, list[Tensor]] | None = None
        self._counters = _Counters()

    @property
    def version(self) -> int:
        return self._version

    @property
    def _longest(self) -> int:
        return min(self._context, self._store.longest)

    def generate(
        self, prompts: Series[Series[int]], params: SamplingParams | Series[SamplingParams]
    ) -> list[Completion]:
        """Runs prompts (token ids) to the end and returns their completions in the order given.

        The noise is keyed by the prompt's place in the list: the same call gives the same tokens.
        """
        if self._live:
            raise UserError("generate() needs the engine to itself, and requests are live: drain or abort them first.")
        if self._paused or self._saved is not None:
            raise UserError(
                "generate() on an engine that is paused or offloaded would wait for ever: resume() and onload() first."
            )
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(
                f"generate() got {len(prompts)} prompts but {len(each)} sampling parameters: give one, or one a prompt."
            )
        requests = [
            Request(uid="generate", sample_index=index, prompt_ids=prompt, params=own)
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]
        try:
            for request in requests:
                self.submit(request)
            done: dict[str, Completion] = {}
            while self._live:
                done.update((completion.request.id, completion) for completion in self.step().finished)
        except BaseException:
            self.abort()
            raise
        return [done[request.id] for request in requests]

    def submit(self, request: Request) -> None:
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already running")
        self._check(request)
        tokens = [*(int(token) for token in request.prompt_ids), *request.generated_ids]
        limit = min(len(request.prompt_ids) + request.params.max_new_tokens, self._longest)
        sequence = Sequence(request, self._arrivals, limit)
        sequence.token_ids = tokens
        sequence.logprobs, sequence.versions = list(request.generated_logprobs), list(request.generated_versions)
        self._arrivals += 1
        self._live[request.id] = sequence
        self._scheduler.add(sequence)

    def step(self) -> StepOutput:
        finished: list[Completion] = []
        new_tokens = 0
        if not self._paused and self._saved is None and self._live:
            plan = self._scheduler.schedule()
            new_tokens = self._run(plan, finished)
        return StepOutput(
            finished=tuple(finished),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_new_tokens=new_tokens,
        )

    def abort(self, ids: Series[str] | None = None) -> tuple[Completion, ...]:
        wanted = list(self._live) if ids is None else [name for name in dict.fromkeys(ids) if name in self._live]
        return tuple(self._end(self._live[name], FinishReason.ABORTED) for name in wanted)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def update_weights(self, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode) -> None:
        if mode not in ("keep", "recompute"):
            raise UserError(f"unknown weight update mode {mode!r}. Known: keep, recompute.")
        self._weights.update(tensors)
        self._version = version
        if mode == "recompute":
            self._scheduler.forget_computed()
        self._prefixes.clear()

    def onload(self) -> None:
        if self._saved is None:
            return
        self._pool.allocate()
        for row, content in self._saved.items():
            count = int(self._table.num_computed[row])
            self._pool.write(self._store.cells(row, count), content)
        self._saved = None

    def offload(self) -> None:
        if self._saved is not None:
            return
        rows = [sequence.row for sequence in self._scheduler.running]
        self._saved = {row: self._pool.read(self._store.cells(row, int(self._table.num_computed[row]))) for row in rows}
        self._pool.release()

    def memory(self) -> EngineMemory:
        return EngineMemory(weights=self._weights.num_bytes, kv_cache=self._pool.num_bytes)

    def metrics(self) -> Metrics:
        return {}

    def report(self) -> EngineReport:
        return EngineReport(invariant=False, reason="not verified", attention=f"slots, {self._attention.name}")

    def _check(self, request: Request) -> None:
        """Raises UserError for what cannot be served."""
        prompt, params = len(request.prompt_ids), request.params
        if not prompt:
            raise UserError(
                f"request {request.id}: the prompt is empty. Give at least one token (a BOS token will do)."
            )
        if prompt >= self._context:
            raise UserError(
                f"request {request.id}: the prompt has {prompt} tokens and the model's context holds {self._context}:"
                " nothing can be generated. Shorten or filter the prompts."
            )
        if min(prompt + params.max_new_tokens, self._context) > self._store.longest:
            raise UserError(
                f"request {request.id}: {prompt} prompt tokens + max_new_tokens={params.max_new_tokens} do not fit in the"
                f" KV store, which holds {self._store.longest} for one sequence. Raise the engine's max_tokens or lower max_new_tokens."
            )
        done = len(request.generated_ids)
        if not done == len(request.generated_logprobs) == len(request.generated_versions):
            raise UserError(
                f"request {request.id}: {done} generated tokens but {len(request.generated_logprobs)} log-probs and"
                f" {len(request.generated_versions)} versions: a resumed request needs one of each a token."
            )
        if done >= min(params.max_new_tokens, self._longest - prompt):
            raise UserError(
                f"request {request.id}: it already has {done} generated tokens, its limit: there is nothing to resume."
            )
        if params.stop and self._tokenizer is None:
            raise UserError(f"request {request.id}: stop strings need a tokenizer: NativeEngine(model, tokenizer=...).")

    @torch.inference_mode()
    def _run(self, plan: Plan, finished: list[Completion]) -> int:
        """One forward pass, and a token for each row whose last token ran."""
        table = self._table
        if plan.all_decode:
            rows = sampled = plan.rows
            positions = table.num_computed[rows]
            wanted = np.arange(len(rows))
        else:
            rows = np.repeat(plan.rows, plan.counts)
            ends = np.cumsum(plan.counts)
            starts = table.num_computed[plan.rows]
            positions = np.arange(len(rows)) - np.repeat(ends - plan.counts - starts, plan.counts)
            complete = starts + plan.counts == table.num_tokens[plan.rows]
            sampled, wanted = plan.rows[complete], ends[complete] - 1
        logits = self._runner.forward(table.token_ids[rows, positions], rows, positions, wanted)
        table.num_computed[plan.rows] += plan.counts
        if len(sampled):
            self._sample(logits, sampled, finished)
        return len(sampled)

    def _sample(self, logits: Tensor, rows: Int64Array, finished: list[Completion]) -> None:
        table = self._table
        generated = table.num_tokens[rows] - table.num_prompt[rows]
        uniform = keyed_uniform(table.noise_key[rows], generated)
        tokens, logprobs = self._sampler.draw(logits[: len(rows)], table.temperature[rows], uniform)
        check_finite(logprobs)
        table.append(rows, tokens, logprobs, self._version)
        stopped = (tokens[:, None] == table.stop_ids[rows]).any(1)
        ended = stopped | (table.num_tokens[rows] >= table.limit[rows])
        for at in np.flatnonzero(ended):
            sequence = table.sequences[rows[at]]
            assert sequence is not None
            finished.append(self._end(sequence, FinishReason.STOP if stopped[at] else FinishReason.LENGTH))

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
        )


class _Counters:
    """What metrics() reports since it was last asked."""

    def __init__(self) -> None:
        self.since = time.perf_counter()


def _load(
    model: PreTrainedModel | str | Path, tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[PreTrainedModel, "PreTrainedTokenizerBase | None"]:
    if isinstance(model, PreTrainedModel):
        return model.eval(), tokenizer
    return AutoModelForCausalLM.from_pretrained(model).eval(), tokenizer or AutoTokenizer.from_pretrained(model)


def _attention(pool: KVPool, store: SlotStore, longest: int) -> AttentionBackend:
    if pool.device.type == "cpu" and pool.dtype == torch.float32:
        try:
            return KernelAttention(pool, store, longest)
        except kernels.KernelsUnavailable:
            pass
    return TorchAttention(pool, store)
