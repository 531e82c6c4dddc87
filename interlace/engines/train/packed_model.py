"""A transformers model called on packed micro-batches, in CPU memory that is reused."""

from __future__ import annotations

import copy
import ctypes
import inspect
import platform
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from interlace.core.errors import UserError
from interlace.engines.train.attention import UNTRACED_ATTENTION
from interlace.engines.train.logprobs import several_logprobs, token_logprobs, top_logprobs
from interlace.engines.train.matmul import use_fast_products
from interlace.engines.train.probes import (
    PROBE_TOLERANCE,
    check_padded,
    gradient_gaps,
    install_packed_attention,
    relative_gap,
    run_alone,
    vector_gradients,
)
from interlace.engines.train.speedups import apply_liger, compile_layers
from interlace.models.action_head import head_of
from interlace.models.expert_parallel import share_experts
from interlace.models.inputs import input_embedding
from interlace.models.residence import make_current
from interlace.models.tensor_parallel import VocabularyPart, share_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from interlace.engines.train.config import SpeedupConfig, TrainedConfig
    from interlace.engines.train.packing import MicroBatch
    from interlace.engines.train.ranks import Ranks

ALIGNMENT = 64
"""Alignment in bytes of torch's allocations on a CPU."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt in glibc's malloc.h."""
KEPT = 1 << 30
LARGEST_KEPT = 32 << 20
"""The largest value that glibc allows."""
GROWTH = 64 << 20


def keep_freed_memory() -> None:
    """Makes the process keep up to 1 GiB of freed memory instead of returning it to the system.

    A micro-batch frees memory that the next one allocates. If the memory was returned in between, the system clears
    and maps each page again at the first write, which takes a tenth of an update of a small model. The setting applies
    to the whole process and has no effect if the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((M_TRIM_THRESHOLD, KEPT), (M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TOP_PAD, GROWTH)):
        mallopt(option, value)


class PackedModel:
    """Runs a model on packed rows if its attention can be replaced, else on padded rows; see `attention`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: str,
        trained: TrainedConfig,
        speedups: SpeedupConfig,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self.num_ids: int | None = None
        """Number of ids over which log-probs are normalized; see TrainConfig."""
        self.device = torch.device(device)
        make_current(device)
        reads = input_embedding(model.config)
        self.placeholder = None if reads is None else reads.placeholder
        """Token that arrays replace; None if the model reads only tokens."""
        head = model.get_output_embeddings()
        self.answers_in_some = head is not None and _count_rows(head) < _count_rows(model.get_input_embeddings())
        """Flag: the head covers only the first tokens of the vocabulary."""
        self._head = head_of(model)
        if self._head and ranks.tensor_mesh is not None:
            raise UserError("ranks cannot share a head whose answers are numbers. Set tensor_parallel=1.")
        _align_tensors(model)
        model.eval()  # no dropout: log-probs must equal the rollout engine's
        if trained.gradient_checkpointing:
            _checkpoint_layers(model)
        if speedups.liger:
            apply_liger(model, self.device)
        if self.device.type == "cpu":
            use_fast_products(model)
            keep_freed_memory()
        self.vocabulary = self._share_layers(ranks)
        ranks.shard(model, self.device, reshard=trained.reshard)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        refusal = install_packed_attention(model, ranks)
        if refusal is not None:
            check_padded(model)
        self.is_packed = refusal is None
        self.attention = (
            "packed, without padding" if refusal is None else f"padded, with the model's own attention: {refusal}"
        )
        if self.takes_answers and not (self.is_packed and self._keeps_logits):
            raise UserError(
                f"{type(model).__name__} draws chains of numbers, which packed rows alone can train, and its rows are "
                f"{self.attention}. Take a body whose attention transformers' attention interface computes."
            )
        if ranks.shape.context > 1 and (self.placeholder is not None or not self.is_packed):
            why = "it reads arrays in addition to tokens" if self.is_packed else f"rows are {self.attention}"
            raise UserError(
                f"context_parallel={ranks.shape.context}: ranks share packed rows of tokens alone, and of "
                f"{type(model).__name__} {why}. Set context_parallel=1."
            )
        if speedups.compile:
            compile_layers(model, self.device)
            if self.is_packed:
                model.set_attn_implementation(UNTRACED_ATTENTION)
        ranks.reshard(model)  # frees the parameters gathered by the probes

    @property
    def takes_answers(self) -> bool:
        """Returns True if the outputs of the model's head depend on whole answers."""
        return self._head is not None and self._head.takes_answers

    def _share_layers(self, ranks: Ranks) -> VocabularyPart | None:
        """Shares layers and experts over the ranks' mesh, and checks that the results stay the same.

        Returns this rank's part of the logits; None if each rank has all logits.
        """
        if ranks.tensor_mesh is None and ranks.expert_mesh is None:
            return None
        if ranks.fill is None:
            return self._share_and_check(self.model, ranks)
        self._share_and_check(_make_miniature(self.model), ranks)
        return _share_model(self.model, ranks)

    def _share_and_check(self, model: PreTrainedModel, ranks: Ranks) -> VocabularyPart | None:
        """Shares a model's layers. Raises UserError if the shared model gives other logits, or other gradients."""
        expected, gradients = run_alone(model), vector_gradients(model)
        part = _share_model(model, ranks)
        got, first = run_alone(model), part.first if part else 0
        gaps = {"logits": relative_gap(expected[:, first : first + got.shape[1]], got)}
        found = gradient_gaps(gradients, vector_gradients(model, first))
        gaps |= {f"gradients of {name}": gap for name, gap in found.items()}
        result, gap = max(gaps.items(), key=itemgetter(1))
        if any(float(other) >= PROBE_TOLERANCE for other in ranks.gather_texts(repr(gap))):
            what = "tensor-parallel plan" if ranks.tensor_mesh else "stack of experts"
            setting = "tensor_parallel" if ranks.tensor_mesh else "expert_parallel"
            raise UserError(
                f"{type(model).__name__}: shared by {ranks.num_ranks} ranks it gives other {result} than whole "
                f"(by {gap:.1e} of the largest), so its {what} in transformers does not fit the model. Set {setting}=1."
            )
        return part

    def logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Computes (log-probs, entropy) of the response tokens, [T] each, at a temperature."""
        targets_T = batch.targets_T if batch.share is None else batch.targets_T[batch.share.own_T]
        outputs = self.outputs(batch)
        if self._head and batch.answers is not None:
            selected = batch.answers.selected_T
            found = self._head.logprobs(outputs, batch.answers.targets_A, temperature)
            logprobs, entropy = (each.index_select(0, selected) for each in found)
        elif self._head:
            logprobs, entropy = self._head.logprobs(outputs, targets_T, temperature)
        else:
            known = outputs[:, : self._num_known_columns]
            logprobs, entropy = token_logprobs(known, targets_T, temperature, self.vocabulary)
        return self.on_all(batch, logprobs), self.on_all(batch, entropy)

    @property
    def _num_known_columns(self) -> int | None:
        """Columns of this rank's logits whose ids can be drawn. None if all can be."""
        if self.num_ids is None or self.vocabulary is None:
            return self.num_ids
        return max(0, self.num_ids - self.vocabulary.first)

    def several_logprobs(self, batch: MicroBatch, ids_TK: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Computes as logprobs() does, and in addition the log-probs of K further tokens at each place, [T, K].

        Raises ValueError for a model whose ranks share the vocabulary or rows, and for a head without tokens.
        """
        self._check_whole(batch)
        targets_TJ = torch.cat([batch.targets_T[:, None], ids_TK], 1)
        found_TJ, entropy_T = several_logprobs(self.outputs(batch)[:, : self.num_ids], targets_TJ, temperature)
        return found_TJ[:, 0], entropy_T, found_TJ[:, 1:]

    def top_logprobs(self, batch: MicroBatch, temperature: float, count: int) -> Tensor:
        """Computes [T, 1 + 2 count]: log-prob of the response token, then ids and log-probs of the most probable ones.

        Raises the errors of several_logprobs().
        """
        self._check_whole(batch)
        return top_logprobs(self.outputs(batch)[:, : self.num_ids], batch.targets_T, temperature, count)

    def _check_whole(self, batch: MicroBatch) -> None:
        if self._head or self.vocabulary is not None or batch.share is not None:
            raise ValueError("log-probs of several tokens need all logits of a language model on each rank")

    def on_all(self, batch: MicroBatch, own: Tensor) -> Tensor:
        """Returns [T] from this rank's part of it."""
        return own if batch.share is None else batch.share.on_all(own, len(batch.targets_T))

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Computes [t, outputs] at the selected positions: this rank's part of the logits or of a head's values.

        If the batch has whole answers, the positions are of all their tokens.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self._run_model(batch)

    def _run_model(self, batch: MicroBatch) -> Tensor:
        arguments: dict[str, object] = {"position_ids": batch.position_ids, "use_cache": False}
        if batch.layout is None:
            arguments["attention_mask"] = batch.attention_mask
        else:
            arguments["packed_layout"] = batch.layout
        if batch.given is not None:
            arguments |= {"inputs": batch.given.arrays, "input_places": batch.given.places_P}
        whole = batch.layout is None or not self._keeps_logits
        keep, targets = batch.keep_T, batch.targets_T
        if batch.answers is not None:
            keep, targets = batch.answers.keep_A, batch.answers.targets_A
        answers = targets if self.takes_answers else None
        with nullcontext() if whole else _rows_before(self.model.get_output_embeddings(), keep, answers):
            logits: Tensor = self.model(batch.input_ids, **arguments).logits
        rows = logits.flatten(0, 1)  # a view; selecting row 0 would need a second table in the backward
        return rows.index_select(0, keep) if whole else rows


def _share_model(model: PreTrainedModel, ranks: Ranks) -> VocabularyPart | None:
    if ranks.expert_mesh:
        share_experts(model, ranks.expert_mesh)
    return share_layers(model, ranks.tensor_mesh) if ranks.tensor_mesh else None


def _make_miniature(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same architecture with few layers and words and random weights, equal on every rank."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size = min(2, text.num_hidden_layers), min(512, text.vocab_size)
    text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = type(model)(config).float().eval()
    return made


def _count_rows(table: nn.Module) -> int:
    return table.get_parameter("weight").shape[0]


@contextmanager
def _rows_before(head: nn.Module, keep_T: Tensor, answers: Tensor | None) -> Iterator[None]:
    """Makes a head compute the selected rows only, as `logits_to_keep` would, with a reproducible gradient.

    answers: [T] second argument of a head that returns the distributions of answers. If None, the head takes none.

    Several samples select the row of a shared token. transformers indexes with the tensor, whose gradient is summed by
    several threads in varying order; the gradient of index_select is summed in the order of the rows.
    """

    def select(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = args[0].index_select(-2, keep_T)
        return (rows, *args[1:]) if answers is None else (rows, answers)

    hook = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()


def _align_tensors(model: PreTrainedModel) -> None:
    """Copies tensors that a file left at unaligned addresses. Matrix products round differently there, and a model that
    was just loaded must give the same bits as the one that was saved."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Recomputes each layer in the backward. transformers does so only for layers in training mode, which enables
    dropout too, so only the layers themselves are set to training mode, with dropout rates of 0. Some architectures
    name a rate `resid_pdrop` or `layerdrop`."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no layers to recompute: set gradient_checkpointing=false.")
    for layer in layers:
        layer.gradient_checkpointing, layer.training = True, True
        vars(layer)["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=False)
        for name, value in vars(layer).items():
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
