"""Preparation of a loaded model for serving: attention routing, KV store, choice and verification of a runner."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from interlace.core.errors import UserError
from interlace.engines.cpu.compiled import KernelsUnavailable
from interlace.engines.cpu.decoder import DecoderRunner, is_llama_shaped
from interlace.engines.cpu.int8 import refuse_eight_bits
from interlace.engines.cpu.verify import SHORT, UNSURE, Probe, probe_prompts, reference_logits, routing_fault
from interlace.engines.rollout.attention import (
    AttentionBackend,
    KernelAttention,
    RoutedModel,
    TorchAttention,
    restore_attention,
    route_attention,
)
from interlace.engines.rollout.config import NativeConfig
from interlace.engines.rollout.graph_runner import CudaCapture, GraphRunner
from interlace.engines.rollout.kv_store import STORES, KVPool, KVStore
from interlace.engines.rollout.protocol import EngineReport
from interlace.engines.rollout.runner import PAD_ROWS, ModelRunner, PlainRunner, Runner
from interlace.models.length_changes import (
    MARGIN,
    MODEL_ERRORS,
    LengthChange,
    find_length_changes,
    lower_limit,
    probe_ids,
)
from interlace.models.tensor_parallel import gather_logits, share_layers

_SPARE_CELLS = PAD_ROWS[-1]
"""Cells for padding tokens and for the tokens of a probe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModel:
    """Parts that the engine's loop uses."""

    model: PreTrainedModel
    runner: Runner
    attention: AttentionBackend | None
    """Attention backend; None for the plain fallback."""
    pool: KVPool
    store: KVStore
    report: EngineReport


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingConfig:
    """The engine's settings, and the facts about its model and process."""

    engine: NativeConfig
    longest: int
    """The model's context, in tokens."""
    num_threads: int
    mesh: "DeviceMesh | None" = None
    """Ranks that share the model's layers; None if the model is whole."""


_ROWS = 2
"""Rows of a probe: the sequence that passes the change, and one before it in the same forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthProbe:
    """A sequence that passes a change, with the logits of the model's attention."""

    change: LengthChange
    prompt: list[int]
    expected: Tensor
    is_lowered_without_effect: bool
    """True if the change is too long to reach and the model does not read the lowered value."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """Results of the model with its original attention."""

    prompts: list[list[int]]
    logits: list[Tensor]
    beyond: list[LengthProbe]
    """Sequences beyond the lengths at which the computation changes."""


_KEPT_TOKENS, _MOST_KEPT = 64, 1024
"""Cells per row for tokens of ended sequences (with short contexts, not all rows are needed), and the most rows."""


def num_retained(config: NativeConfig) -> int:
    """Returns the number of rows of the store for tokens of ended sequences."""
    return max(config.max_running, 8, min(config.kv_tokens // _KEPT_TOKENS, _MOST_KEPT))


def serve(model: PreTrainedModel, config: ServingConfig) -> PreparedModel:
    """Prepares a model. If its attention cannot be routed, the plain fallback serves it, which the report states."""
    original = model.config._attn_implementation
    prompts = probe_prompts(model.config.get_text_config().vocab_size)
    logits = _compute_expected(model, prompts)
    reachable = min(config.longest, STORES[config.engine.kv].longest_in(config.engine.kv_tokens))
    expected = _Expected(prompts, logits, build_length_probes(model, reachable))
    notes: list[str] = []
    if config.mesh:
        share_layers(model, config.mesh)
        gather_logits(model, config.mesh)
        notes.append(f"layers are shared by {config.mesh.size()} ranks, with the transformers model itself")
    try:
        routed = route_attention(model)
        fault = routing_fault(model.config, routed.traits)
    except MODEL_ERRORS as error:
        # A model without support of the interface can fail anywhere in its code; the fallback serves it unchanged.
        fault = f"its forward pass fails through the attention interface ({type(error).__name__}: {error})"
    if fault is None:
        serving = _serve_routed(model, routed, config, expected, notes)
        if serving is not None:
            return serving
        fault = notes.pop()
    restore_attention(model, original)
    return _serve_plain(model, config, expected, fault)


def _compute_expected(model: PreTrainedModel, prompts: list[list[int]]) -> list[Tensor]:
    """Computes the logits of each prompt with the unchanged model. Raises UserError if its forward pass fails."""
    try:
        return reference_logits(model, prompts)
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as error:
        raise UserError(
            f"{type(model).__name__} cannot generate: its forward pass in transformers fails ({type(error).__name__}: "
            f"{error}). Give a causal language model that transformers runs."
        ) from error


def _serve_routed(
    model: PreTrainedModel, routed: RoutedModel, config: ServingConfig, wanted: _Expected, notes: list[str]
) -> PreparedModel | None:
    """Prepares the fast path. Returns None, with the fault as last note, if its logits differ from the model's."""
    pool = KVPool(routed.shapes, config.engine.kv_tokens + _SPARE_CELLS, model.dtype, model.device)
    store = _store(pool, config)
    attention = _attention(pool, store, config, notes)
    spare_row = config.engine.max_running
    plain = ModelRunner(model, routed.hub, attention, spare_row)
    runners: list[Runner] = [plain]
    if config.engine.cuda_graphs and model.device.type == "cuda" and isinstance(attention, TorchAttention):
        forms = (True, False) if config.engine.compile_model and not config.mesh else (False,)
        runners[:0] = [
            GraphRunner(
                plain, attention, store, spare_row=spare_row, make_capture=partial(CudaCapture, model.device),
                compiles=compiles,
            )
            for compiles in forms
        ]  # fmt: skip
    if (
        config.engine.compile_decoder
        and not config.mesh
        and isinstance(attention, KernelAttention)
        and is_llama_shaped(model)
    ):
        longest = min(config.longest, store.longest)
        eight = config.engine.weights == "int8"
        decoder = DecoderRunner(model, routed, attention, longest, config.num_threads, in_eight_bits=eight)
        runners.insert(0, decoder)
    if config.engine.weights == "int8" and not isinstance(runners[0], DecoderRunner):
        refuse_eight_bits(model)
    for runner in runners:
        fault = find_length_fault(model, runner, store, wanted.beyond)
        probe = Probe(runner, store, config.engine.max_running)
        fault = fault or probe.logits_fault(wanted.prompts, wanted.logits)
        variance = _explain_variance(runner, probe, wanted.prompts[0]) if fault is None else None
        probe.close()
        if fault is None:
            report = EngineReport(
                invariant=variance is None,
                reason=variance or f"verified on this model: chunks and other rows changed no bit; {runner.invariance}",
                attention=f"{config.engine.kv}, {attention.name}, {runner.name}",
                notes=tuple(notes),
            )
            return PreparedModel(model=model, runner=runner, attention=attention, pool=pool, store=store, report=report)
        notes.append(f"{runner.name} is not used: {fault}")
    return None


def _explain_variance(runner: Runner, probe: Probe, prompt: list[int]) -> str | None:
    """Returns the reason why a row's bits depend on other rows; None if they do not.

    Sets the smallest padding with which they are independent.
    """
    if not isinstance(runner, ModelRunner):
        return probe.invariance_fault(prompt)
    faults: list[str] = []
    for rows in PAD_ROWS:
        runner.pad_rows = rows
        fault = probe.invariance_fault(prompt)
        if fault is None or fault == UNSURE:
            return fault
        faults.append(fault)
    runner.pad_rows = PAD_ROWS[0]
    return faults[0]


def _serve_plain(model: PreTrainedModel, config: ServingConfig, wanted: _Expected, fault: str) -> PreparedModel:
    pool = KVPool((), config.engine.kv_tokens, model.dtype, model.device)
    store = _store(pool, config)
    runner = PlainRunner(model, use_cache=True)
    reached = [probe for probe in wanted.beyond if probe.change.is_reached]
    probe = Probe(runner, store, config.engine.max_running)
    try:
        cache_fault = probe.logits_fault(wanted.prompts, wanted.logits)
        probe.close()
        cache_fault = cache_fault or find_length_fault(model, runner, store, reached)
    except MODEL_ERRORS as error:
        cache_fault = f"{type(error).__name__}: {error}"
    probe.close()
    runner.clear()
    if cache_fault is not None:
        runner = PlainRunner(model, use_cache=False)
    reason = (
        "rows run alone and are recomputed in each step"
        if cache_fault
        else "rows run alone, but a resumed one is prefilled in one piece"
    )
    report = EngineReport(
        invariant=cache_fault is not None,
        reason=reason,
        attention=f"plain fallback, one sequence at a time: {fault}",
        notes=(f"the model's own cache is not used: {cache_fault}",) if cache_fault else (),
    )
    return PreparedModel(model=model, runner=runner, attention=None, pool=pool, store=store, report=report)


def _store(pool: KVPool, config: ServingConfig) -> KVStore:
    store = STORES[config.engine.kv](
        pool, config.engine.max_running + 1 + num_retained(config.engine), config.engine.kv_tokens
    )
    store.page_table[config.engine.max_running] = config.engine.kv_tokens  # the spare row: padding tokens write there
    return store


def _attention(pool: KVPool, store: KVStore, config: ServingConfig, notes: list[str]) -> AttentionBackend:
    if pool.device.type != "cpu" or pool.dtype != torch.float32 or not config.engine.compile_kernels:
        return TorchAttention(pool, store)
    try:
        return KernelAttention(pool, store, min(config.longest, store.longest))
    except KernelsUnavailable as error:
        notes.append(f"the C++ kernels are not used: {error}")
        return TorchAttention(pool, store)


def build_length_probes(model: PreTrainedModel, longest: int) -> list[LengthProbe]:
    """Prepares the probes, with the model's attention. longest: length of the longest served sequence, in tokens.

    A window larger than the reach of a probe is omitted, because attention receives it as an argument.
    """
    probes = []
    for change in find_length_changes(model.config, longest):
        if change.is_window and not change.is_reached:
            continue
        length = min(change.probe_tokens, longest)
        prompt = probe_ids(model.config.get_text_config().vocab_size, length, torch.device("cpu")).tolist()
        with _at_probe(model, change):
            expected = reference_logits(model, [prompt])[0]
        without = not change.is_reached and torch.equal(expected, reference_logits(model, [prompt])[0])
        probes.append(LengthProbe(change=change, prompt=prompt, expected=expected, is_lowered_without_effect=without))
    return probes


def find_length_fault(model: PreTrainedModel, runner: Runner, store: KVStore, probes: list[LengthProbe]) -> str | None:
    """Returns the first difference between the runner and the model, or None. The store is empty before and after."""
    for probe in probes:
        change = probe.change
        if probe.is_lowered_without_effect:
            return f"its {change.field} = {change.tokens} could not be probed"
        rows = _ROWS if store.num_cells >= _ROWS * max(len(probe.prompt), SHORT) else 1
        cells = Probe(runner, store, rows, tokens=len(probe.prompt))
        with _at_probe(model, change):
            fault = cells.length_fault(probe.prompt, probe.expected, len(probe.prompt) - MARGIN)
        cells.close()
        if fault is not None:
            return f"{fault} beyond {change.field} = {change.tokens}"
    return None


@contextmanager
def _at_probe(model: PreTrainedModel, change: LengthChange) -> Iterator[None]:
    with nullcontext() if change.is_reached else lower_limit(model, change):
        yield
