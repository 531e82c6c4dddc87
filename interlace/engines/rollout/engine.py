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
from interlace.engines.rollout.counters import Counters
from interlace.engines.rollout.fused import FusedRunner
from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.live_weights import LiveWeights
from interlace.engines.rollout.prefix import PrefixIndex
from interlace.engines.rollout.protocol import EngineMemory, EngineReport, StepOutput, UpdateMode
from interlace.engines.rollout.sampling import KernelSampler, PlainSampler, TorchSampler, draw
from interlace.engines.rollout.scheduler import Plan, Scheduler
from interlace.engines.rollout.sequence import Sequence, SequenceTable
from interlace.engines.rollout.serving import KVKind, ServingConfig, serve

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
        kv: KVKind = "slots",
        fuse: bool = True,
        compile_kernels: bool = True,
    ) -> None:
        """Prepares the model and checks, on it, what report() then says.

        tokenizer: for stop strings; loaded along where the model is a path. max_running: sequences at once.
        max_tokens: cells of the KV store. max_batch_tokens: of one forward pass, prompts are cut into chunks to fit.
        seed: of the sampling noise. fuse, compile_kernels: off, to compare with the transformers model itself.
        """
        self._model, self._tokenizer = _load(model, tokenizer)
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._context = int(context or max_tokens)
        config = ServingConfig(
            max_running=max_running, max_tokens=max_tokens, longest=self._context, kv=kv, fuse=fuse,
            compile_kernels=compile_kernels,
        )  # fmt: skip
        serving = serve(self._model, config)
        self._runner, self._attention, self._pool = serving.runner, serving.attention, serving.pool
        self._store, self._report = serving.store, serving.report
        self._weights = LiveWeights(self._model)
        self._table = SequenceTable(max_running, seed)
        self._prefixes = PrefixIndex(self._table, self._store, enabled=self._attention is not None)
        self._scheduler = Scheduler(self._table, self._store, self._prefixes, max_batch_tokens=max_batch_tokens)
        self._sampler: PlainSampler = KernelSampler() if serving.compiled else TorchSampler()
        self._live: dict[str, Sequence] = {}
        self._arrivals = self._version = 0
        self._paused = False
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
        self._check(request)
        prompt = [int(token) for token in request.prompt_ids]
        limit = min(len(prompt) + request.params.max_new_tokens, self._context)
        sequence = Sequence(
            request=request, arrival=self._arrivals, limit=limit, token_ids=prompt + list(request.generated_ids),
            logprobs=list(request.generated_logprobs), versions=list(request.generated_versions),
        )  # fmt: skip
        self._arrivals += 1
        self._live[request.id] = sequence
        self._scheduler.add(sequence)

    def step(self) -> StepOutput:
        finished: list[Completion] = []
        new_tokens = 0
        if self._live and not self._paused and self._saved is None:
            start = time.perf_counter()
            plan = self._scheduler.schedule()
            self._counters.schedule_s += time.perf_counter() - start
            new_tokens = self._run(plan, finished) if len(plan.rows) else 0
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
            self._forget_computed()
        self._prefixes.clear()

    def onload(self) -> None:
        if self._saved is None:
            return
        self._pool.allocate()
        if isinstance(self._runner, FusedRunner):
            self._runner.rebind()
        for row, content in self._saved.items():
            self._pool.write(self._store.cells(row, int(self._table.num_computed[row])), content)
        self._saved = None

    def offload(self) -> None:
        if self._saved is not None:
            return
        self._prefixes.clear()
        rows = [sequence.row for sequence in self._scheduler.running]
        self._saved = {row: self._pool.read(self._store.cells(row, int(self._table.num_computed[row]))) for row in rows}
        self._pool.release()

    def memory(self) -> EngineMemory:
        return EngineMemory(weights=self._weights.num_bytes, kv_cache=self._pool.num_bytes)

    def metrics(self) -> Metrics:
        used = 1.0 - self._store.num_free / max(self._store.num_cells, 1)
        attention_s = self._attention.seconds if self._attention is not None else 0.0
        return self._counters.read(self._scheduler, used, attention_s)

    def report(self) -> EngineReport:
        return self._report

    def _forget_computed(self) -> None:
        self._scheduler.forget_computed()
        if self._saved is not None:
            self._saved = {}

    def _check(self, request: Request) -> None:
        """Raises UserError for what cannot be served."""
        prompt, params, what = len(request.prompt_ids), request.params, f"request {request.id}"
        if not prompt:
            raise UserError(f"{what}: the prompt is empty. Give it at least one token (a BOS token will do).")
        if prompt >= self._context:
            raise UserError(
                f"{what}: the prompt has {prompt} tokens and the model's context holds {self._context}: nothing can be"
                " generated. Shorten or filter the prompts."
            )
        if min(prompt + params.max_new_tokens, self._context) > self._store.longest:
            raise UserError(
                f"{what}: {prompt} prompt tokens + max_new_tokens={params.max_new_tokens} do not fit in the KV store,"
                f" which holds {self._store.longest} for one sequence. Raise max_tokens or lower max_new_tokens."
            )
        done = len(request.generated_ids)
        if not done == len(request.generated_logprobs) == len(request.generated_versions):
            raise UserError(
                f"{what}: {done} generated tokens, {len(request.generated_logprobs)} log-probs and"
                f" {len(request.generated_versions)} versions: a resumed request needs one of each a token."
            )
        if done >= min(params.max_new_tokens, self._context - prompt):
            raise UserError(f"{what}: it has {done} generated tokens already, its limit: there is nothing to resume.")
        if params.stop and self._tokenizer is None:
            raise UserError(f"{what}: stop strings need a tokenizer: NativeEngine(model, tokenizer=...).")
        vocab = self._model.config.get_text_config().vocab_size
        for token in (*request.prompt_ids, *request.generated_ids, *(token for token, _ in params.logit_bias)):
            if not 0 <= token < vocab:
                raise UserError(f"{what}: token id {token} is not in the model's vocabulary of {vocab}.")

    @torch.inference_mode()
    def _run(self, plan: Plan, finished: list[Completion]) -> int:
        """One forward pass, and a token for each row whose last token ran. Returns how many."""
        table, start = self._table, time.perf_counter()
        if plan.all_decode:
            rows = sampled = plan.rows
            positions, wanted = table.num_computed[rows], np.arange(len(rows))
        else:
            rows, ends = np.repeat(plan.rows, plan.counts), np.cumsum(plan.counts)
            begins = table.num_computed[plan.rows]
            positions = np.arange(len(rows)) - np.repeat(ends - plan.counts - begins, plan.counts)
            complete = begins + plan.counts == table.num_tokens[plan.rows]
            sampled, wanted = plan.rows[complete], ends[complete] - 1
        logits = self._runner.forward(table.token_ids[rows, positions], rows, positions, wanted)
        table.num_computed[plan.rows] += plan.counts
        middle = time.perf_counter()
        if len(sampled):
            self._sample(logits[: len(sampled)], sampled, finished)
        self._counters.count(
            tokens=len(rows), sampled=len(sampled), forward_s=middle - start, sample_s=time.perf_counter() - middle
        )
        return len(sampled)

    def _sample(self, logits: Tensor, rows: Int64Array, finished: list[Completion]) -> None:
        table = self._table
        indices = table.num_tokens[rows] - table.num_prompt[rows]
        tokens, logprobs = draw(logits, rows, indices, table, self._sampler)
        table.append(rows, tokens, logprobs, self._version)
        stopped = (tokens[:, None] == table.stop_ids[rows]).any(1)
        if table.stops_on_text[rows].any():
            stopped |= np.asarray([self._stops_on_text(int(row)) for row in rows])
        ended = stopped | (table.num_tokens[rows] >= table.limit[rows])
        for at in np.flatnonzero(ended):
            reason = FinishReason.STOP if stopped[at] else FinishReason.LENGTH
            finished.append(self._end(table.occupant(rows[at]), reason))

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
        )


def _load(
    model: PreTrainedModel | str | Path, tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[PreTrainedModel, "PreTrainedTokenizerBase | None"]:
    if isinstance(model, PreTrainedModel):
        return model.eval(), tokenizer
    return AutoModelForCausalLM.from_pretrained(model).eval(), tokenizer or AutoTokenizer.from_pretrained(model)
