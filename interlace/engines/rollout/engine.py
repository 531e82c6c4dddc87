"""Native rollout engine: continuous batching for any transformers causal LM, in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from interlace.core.errors import UserError
from interlace.core.state_parts import KV, WEIGHTS
from interlace.core.types import NO_GROUP, FinishReason, Metrics, Request, Response, SampleKey, SamplingParams
from interlace.engines.rollout.agreement import Agreement
from interlace.engines.rollout.config import KVNeeds, NativeConfig
from interlace.engines.rollout.decode_loop import DecodeLoop
from interlace.engines.rollout.graph_runner import GraphRunner
from interlace.engines.rollout.kv_residence import KVResidence
from interlace.engines.rollout.kv_size import longest_sequence, size_kv_cache
from interlace.engines.rollout.live_weights import InstalledVersions, LiveWeights
from interlace.engines.rollout.named_weights import GivenWeights, NamedWeights
from interlace.engines.rollout.prefix import PrefixIndex
from interlace.engines.rollout.prepare_model import ServingConfig, num_retained, serve
from interlace.engines.rollout.protocol import (
    ENGINE_PARTS,
    EngineMemory,
    EngineReport,
    StepOutput,
    SwitchMode,
    check_mode,
)
from interlace.engines.rollout.request_checks import Limits
from interlace.engines.rollout.scheduler import Scheduler
from interlace.engines.rollout.sequence import DrawnTokens, SequenceState, SequenceTable
from interlace.models.action_head import answers_in_numbers, chunk_shape
from interlace.models.inputs import input_embedding
from interlace.models.size import context_length
from interlace.weights.plan import Shard
from interlace.weights.ref import AdapterBase, UpdateMode
from interlace.weights.saved import LandedWeights, SavedWeights, trace_load

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerBase


class NativeParts:
    """Parts of a native engine for one model, and the methods that describe them."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: NativeConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        *,
        seed: int,
        num_threads: int,
        mesh: "DeviceMesh | None",
        kv_needs: KVNeeds,
    ) -> None:
        self.model = model
        """The served model. Only the caller of this engine may run it."""
        context, longest = context_length(model.config) or config.kv_tokens, longest_sequence(config)
        config, note = size_kv_cache(model, config, kv_needs, mesh)
        serving = serve(model, ServingConfig(engine=config, longest=context, num_threads=num_threads, mesh=mesh))
        self._runner, self._attention, self._pool = serving.runner, serving.attention, serving.pool
        self._store, self._report = serving.store, serving.report
        if note:
            self._report = replace(serving.report, notes=(*serving.report.notes, note))
        self._weights = LiveWeights(model, keeps_addresses=isinstance(self._runner, GraphRunner))
        self.agreement = Agreement(mesh)
        self._table = SequenceTable(config.max_running, seed)
        first_spare = config.max_running + 1
        spare_rows = range(first_spare, first_spare + num_retained(config)) if config.prefix_cache else ()
        self._prefixes = PrefixIndex(
            self._table, self._store, enabled=self._attention is not None, spare_rows=spare_rows, now=self.agreement.now
        )
        self._scheduler = Scheduler(self._table, self._store, self._prefixes, max_batch_tokens=config.max_batch_tokens)
        self._decode_loop = DecodeLoop(serving, self._table, self._scheduler, tokenizer, config, self.agreement)
        self._kv = KVResidence(self._pool, self._store, self._table, self._scheduler, self._prefixes)
        self._versions = InstalledVersions(self._weights, self._runner)
        self.limits = Limits(
            context=context, longest=min(longest, self._store.longest),
            vocab_size=model.config.get_text_config().vocab_size,
            has_tokenizer=tokenizer is not None, reads=input_embedding(model.config),
            num_drawable=self._decode_loop.num_drawable,
            needs_queries=answers_in_numbers(model.config), guide_shape=chunk_shape(model.config),
        )  # fmt: skip

    @property
    def weight_shards(self) -> tuple[Shard, ...]:
        """Returns the description of an update: every tensor once, or this rank's part of it."""
        return self._weights.shards

    def clear_prefixes(self) -> None:
        """Drops the keys and values of ended sequences."""
        self._prefixes.clear()

    def memory(self) -> EngineMemory:
        return EngineMemory(weights=self._weights.num_bytes, kv_cache=self._pool.num_bytes)

    def metrics(self) -> Metrics:
        held = {
            "kv_use": self._kv_use(),
            "kv_free_tokens": float(self._store.num_free),
            "older_versions": float(len(self._weights.versions)),
        }
        attention_s = self._attention.seconds if self._attention is not None else 0.0
        return self._decode_loop.counters.read(self._scheduler, self._prefixes.num_reused_tokens, attention_s) | held

    def report(self) -> EngineReport:
        return self._report

    def _kv_use(self) -> float:
        """Returns the share of cells that running sequences hold; reusable cells of ended sequences count as free."""
        return self._store.count_held(self._scheduler.running_rows()) / self._store.num_cells


class NativeEngine(NativeParts):
    """Engine that serves requests with one model and owns the model object: no other code may run or train the object.

    Not thread-safe: one caller at a time. Engines and other models in the same process do not disturb each other.
    """

    gives_up_parts = True

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        *,
        config: NativeConfig | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        seed: int = 0,
        num_threads: int = 1,
        mesh: "DeviceMesh | None" = None,
        kv_needs: KVNeeds | None = None,
    ) -> None:
        """Prepares the model and verifies the properties that report() returns.

        tokenizer: for stop strings; if the model is a path, it is loaded from there. seed: of the sampling noise.
        num_threads: threads of torch, a setting of the whole process (if threads contend for a core, small products
        become hundreds of times slower), and of the C++ decoder, whose threads run whole rows and synchronize only at
        the end of a pass. mesh: ranks that share the model's layers. Each rank has such an engine, and all must receive
        the same calls. kv_needs: for max_tokens=auto. Raises UserError if the KV cache does not hold
        their longest sequence.
        """
        torch.set_num_threads(num_threads)
        loaded, tokenizer = _load_model(model, tokenizer)
        super().__init__(
            loaded, config or NativeConfig(), tokenizer, seed=seed, num_threads=num_threads, mesh=mesh,
            kv_needs=kv_needs or KVNeeds(),
        )  # fmt: skip
        self._live: dict[str, SequenceState] = {}
        self._streaming: set[str] = set()
        """Ids of the live requests that stream."""
        self._num_submitted = 0
        self._is_paused = False

    @property
    def version(self) -> int:
        return self._versions.newest

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Response]:
        """Runs prompts (token ids) to the end and returns their responses in the same order.

        The index of a prompt in the list is the key of its noise: the same call gives the same tokens.
        """
        if self._live:
            raise UserError("generate() needs the engine to itself, and requests are live: drain or abort them first.")
        if self._is_paused or self._kv.is_away:
            raise UserError("generate() would wait for ever: the engine is paused or offloaded.")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(
                f"generate() got {len(prompts)} prompts but {len(each)} sampling parameters: give one, or one a prompt."
            )
        requests = [
            Request(uid="generate", owner=SampleKey(NO_GROUP, index), prompt_ids=prompt, params=own)
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]
        done: dict[str, Response] = {}
        try:
            for request in requests:
                self.submit(request)
            while self._live:
                done.update((response.request.id, response) for response in self.step().finished)
        finally:
            self.abort()
        return [done[request.id] for request in requests]

    def submit(self, request: Request) -> None:
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already live")
        self.limits.check(request)
        # The first query takes the place of a prompt's last token: its logits give the first sampled token.
        prompt = [*request.list_prompt(), *request.query_ids[:1]]
        most = len(request.query_ids) or request.params.max_new_tokens
        limit = min(len(prompt) + most, self.limits.context + bool(request.query_ids))
        sequence = SequenceState(
            request=request, arrival=self._num_submitted, limit=limit, token_ids=prompt + list(request.generated_ids),
            logprobs=list(request.generated_logprobs), versions=list(request.generated_versions),
            raw_logprobs=list(request.generated_raw_logprobs),
        )  # fmt: skip
        if sequence.versions and sequence.versions[-1] in self._weights.versions:
            sequence.version = sequence.versions[-1]
        self._num_submitted += 1
        self._live[request.id] = sequence
        if request.streams:
            self._streaming.add(request.id)
        self._scheduler.add(sequence)

    def step(self) -> StepOutput:
        self.agreement.tick()
        finished: list[Response] = []
        new_tokens, preemptions = 0, self._scheduler.num_preemptions
        if self._live and not self._is_paused and not self._kv.is_away:
            new_tokens, ended = self._decode_loop.advance(self._versions.install, several=bool(self._weights.versions))
            for one in ended:
                finished.append(self._end(self._table.occupant(one.row), one.reason, one.failure))
        self._decode_loop.interrupted.value = 0
        return StepOutput(
            finished=tuple(finished),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_new_tokens=new_tokens,
            kv_use=self._kv_use(),
            num_preemptions=self._scheduler.num_preemptions - preemptions,
            drawn={name: self._table.list_drawn(self._live[name]) for name in sorted(self._streaming)},
        )

    def interrupt(self) -> None:
        self._decode_loop.interrupted.value = 1

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Response, ...]:
        wanted = list(self._live) if ids is None else [name for name in dict.fromkeys(ids) if name in self._live]
        return tuple(self._end(self._live[name], FinishReason.ABORTED) for name in wanted)

    def peek(self, ids: Sequence[str]) -> tuple[Response, ...]:
        """Returns the tokens so far of live requests, which continue. Unknown ids are ignored."""
        live = [self._live[name] for name in ids if name in self._live]
        return tuple(_make_response(one, self._table.copy_row(one), FinishReason.ABORTED) for one in live)

    def release(self, owners: Sequence[SampleKey]) -> None:
        self._prefixes.retained.release(owners)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def update_weights(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        mode: UpdateMode,
        *,
        frozen: bool = False,
        adapters: Sequence[AdapterBase] = (),
    ) -> None:
        check_mode(mode, is_adapter=bool(adapters))
        if adapters:
            begun = [sequence for sequence in self._live.values() if sequence.version is None and sequence.has_begun]
            is_kept = mode == "own" and begun
            self._weights.merge(tensors, adapters, keeps=self._versions.newest if is_kept else None)
            for sequence in begun if is_kept else ():
                sequence.version = self._versions.newest
        else:
            self._weights.update(tensors, frozen=frozen)
        self._apply_update(version, mode)

    def load(self, folder: str | Path, version: int, mode: UpdateMode) -> None:
        check_mode(mode)
        self._weights.update(self.open_folder(folder), frozen=False)
        self._apply_update(version, mode)

    def open_folder(self, folder: str | Path) -> NamedWeights:
        """Returns the weights in a Hugging Face folder by the model's names. Any thread may call it."""
        saved = SavedWeights(folder)
        if saved.shapes.keys() <= self._weights.names:
            return saved
        # transformers saves some architectures under other names; tracing its loader gives the mapping back
        landings = trace_load(type(self.model), self.model.config, saved, self.model.dtype)[1]
        return GivenWeights(LandedWeights(saved, landings, self._weights.shards))

    def _apply_update(self, version: int, mode: UpdateMode) -> None:
        self._versions.rebind()
        self._versions.newest = version
        if mode != "own":
            for sequence in self._live.values():
                sequence.version = None
            self._drop_unused_versions()
        self._prefixes.clear(keeps_old=mode == "keep")
        if mode == "recompute":
            self._kv.forget_computed()

    def _drop_unused_versions(self) -> None:
        self._versions.drop_unused(sequence.version for sequence in self._live.values())

    def onload(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        residence, is_cache = self._weights.residence, KV in parts and self._kv.is_away
        is_weights = WEIGHTS in parts and residence.is_away(WEIGHTS)
        if is_weights:
            residence.onload()
        if is_cache:
            self._pool.allocate()
        if is_weights or is_cache:
            self._versions.rebind()
        if is_cache:
            self._kv.restore()

    def offload(self, kv: SwitchMode = "offload", parts: Sequence[str] = ENGINE_PARTS) -> None:
        if KV in parts and not self._kv.is_away:
            self._kv.offload(kv)
        if WEIGHTS in parts:
            self._weights.residence.offload()

    def _end(self, sequence: SequenceState, reason: FinishReason, failure: str = "") -> Response:
        self._kv.drop_row(sequence.row)
        self._scheduler.remove(sequence, retain=not self._kv.is_away)
        del self._live[sequence.request.id]
        self._streaming.discard(sequence.request.id)
        if sequence.version is not None:
            self._drop_unused_versions()
        return _make_response(sequence, self._table.copy_row(sequence), reason, failure)


def _make_response(sequence: SequenceState, drawn: DrawnTokens, reason: FinishReason, failure: str = "") -> Response:
    return Response(
        request=sequence.request,
        token_ids=tuple(drawn.token_ids),
        logprobs=tuple(drawn.logprobs),
        versions=tuple(drawn.versions),
        finish_reason=reason,
        raw_logprobs=tuple(sequence.raw_logprobs),
        num_cached_tokens=max(0, sequence.num_cached),
        failure=failure,
    )


def _load_model(
    model: PreTrainedModel | str | Path, tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[PreTrainedModel, "PreTrainedTokenizerBase | None"]:
    if isinstance(model, PreTrainedModel):
        return model.eval(), tokenizer
    return AutoModelForCausalLM.from_pretrained(model).eval(), tokenizer or AutoTokenizer.from_pretrained(model)
