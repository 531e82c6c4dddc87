"""`tiny:vla`: a small vision-language-action policy as a Hugging Face model, with an embedding of named arrays.

Its prompt is an instruction and placeholder tokens, whose embeddings come from the robot's sensors; its answer is a
chunk of action tokens. The head has outputs only for action tokens, which are the first of the vocabulary.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForTokenClassification

from interlace.models.config import FLOW, GAUSSIAN, SQUASHED, VLA_TYPE, RobotShape
from interlace.models.flow import read_schedule
from interlace.models.flow_head import FlowOutputs
from interlace.models.tiny import build_word_tokenizer
from interlace.models.transformers_lock import TRANSFORMERS_LOCK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FREQUENCIES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Frequencies, in half turns over the range, of the curves that are mixed into the embeddings of action bins."""


class VLAConfig(Qwen2Config):
    """Configuration of a Qwen2 body, observations and actions."""

    model_type = VLA_TYPE
    state_size: int = 0
    """Size of the state vector; 0 for none."""
    state_tokens: int = 4
    """Placeholders of a state vector."""
    image_size: int = 0
    """Side of the camera's image, in pixels; 0 for none."""
    action_size: int = 1
    """Numbers of an action."""
    chunk: int = 1
    """Actions of an answer."""
    action_bins: int = 256
    """Values of a number."""
    action_head: str = "tokens"
    """Head of the answers; see interlace/models/action_head.py."""
    flow: dict[str, Any] | None = None
    """Settings of head `flow`, as in FlowConfig."""
    first_action_id: int = 0
    """Token of the first bin."""
    placeholder_token_id: int | None = None
    """Token that the embeddings of an observation replace."""
    query_token_ids: list[int] | None = None
    """Placeholder tokens of a chunk that is decoded in parallel; None for autoregressive decoding."""
    actions_low: list[float] | None = None
    """[action_size] values at the lowest bins' outer edges. If None, -1."""
    actions_high: list[float] | None = None


class ImageTower(nn.Module):
    """Small convolutional network: [N, size, size, 3] uint8 to 4 vectors."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 8, stride=4), nn.GELU(), nn.Conv2d(16, 32, 4, stride=2), nn.GELU(),
            nn.Conv2d(32, 32, 3, stride=1), nn.GELU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.out = nn.Linear(32, hidden)

    def forward(self, images: Tensor) -> Tensor:
        """Computes [N, 4, hidden]."""
        scaled = images.to(self.out.weight.dtype).permute(0, 3, 1, 2) / 255 - 0.5
        found = self.layers(scaled).flatten(2).transpose(1, 2)
        return self.out(found)


class Projector(nn.Module):
    """Embeds an observation: a state vector, a camera's image, or both."""

    def __init__(self, config: VLAConfig) -> None:
        super().__init__()
        self._tokens = config.state_tokens
        self.state = (
            nn.Sequential(
                nn.Linear(config.state_size, 128), nn.GELU(), nn.Linear(128, config.state_tokens * config.hidden_size)
            )
            if config.state_size
            else None
        )
        self.image = ImageTower(config.hidden_size) if config.image_size else None

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Computes [N, vectors per observation, hidden] from {"state": [N, F]}, {"image": [N, H, W, 3]} or both."""
        found = []
        if self.state is not None:
            states = inputs["state"].to(next(self.state.parameters()).dtype)
            found.append(self.state(states).unflatten(1, (self._tokens, -1)))
        if self.image is not None:
            found.append(self.image(inputs["image"]))
        return torch.cat(found, 1)


class EmbedsArrays(nn.Module):
    """Part of a body that embeds named arrays with a module `projector`, and accepts them in addition to the tokens."""

    projector: nn.Module
    embed_tokens: nn.Embedding

    def embed_inputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Computes the vectors of placeholder tokens: [N, placeholders per observation, hidden]."""
        return self.projector(inputs)

    def embed_rows(self, input_ids: Tensor, inputs: Mapping[str, Tensor], input_places: Tensor) -> Tensor:
        """Computes the embeddings [1, S, hidden] of tokens and arrays; see forward()."""
        rows: Tensor = self.embed_tokens(input_ids)
        vectors = self.embed_inputs(inputs).flatten(0, 1).to(rows.dtype)
        return rows.flatten(0, 1).index_copy(0, input_places, vectors).view(rows.shape)

    def forward(  # house: the signature is transformers'
        self,
        input_ids: Tensor | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        input_places: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **others: object,
    ) -> object:
        """Runs the body. inputs: arrays of N observations. input_places: flat indices of their placeholders."""
        if inputs is not None and input_ids is not None and input_places is not None:
            inputs_embeds = self.embed_rows(input_ids, inputs, input_places)
            input_ids = None
        elif input_ids is not None and torch.is_grad_enabled():
            # Ranks sum gradients together, so a rank without such samples needs zero gradients for the projector, not
            # None.
            unused = [parameter.sum() for parameter in self.projector.parameters() if parameter.requires_grad]
            input_ids, inputs_embeds = None, sum([0 * each for each in unused], self.embed_tokens(input_ids))
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **others)


class VLAModel(EmbedsArrays, Qwen2Model):
    """Body with a projector of observations."""

    config_class = VLAConfig

    def __init__(self, config: VLAConfig) -> None:
        super().__init__(config)
        self.projector = Projector(config)
        self.post_init()


class VLAForCausalLM(Qwen2ForCausalLM):
    """Policy with logits only for action tokens."""

    config_class = VLAConfig
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012 - as transformers declares it

    def __init__(self, config: VLAConfig) -> None:
        super().__init__(config)
        self.model = VLAModel(config)
        if config.action_head == FLOW:
            self.lm_head = FlowOutputs(config.hidden_size, read_schedule(config))
        else:
            outputs = 2 if config.action_head in (GAUSSIAN, SQUASHED) else config.action_bins
            self.lm_head = nn.Linear(config.hidden_size, outputs, bias=False)
        self.post_init()


class VLAForTokenClassification(Qwen2ForTokenClassification):
    """Critic: one value per token."""

    config_class = VLAConfig


def register_vla() -> None:
    """Registers the model's type with transformers' Auto classes. May be called again."""
    AutoConfig.register(VLAConfig.model_type, VLAConfig, exist_ok=True)
    AutoModel.register(VLAConfig, VLAModel, exist_ok=True)
    AutoModelForCausalLM.register(VLAConfig, VLAForCausalLM, exist_ok=True)
    AutoModelForTokenClassification.register(VLAConfig, VLAForTokenClassification, exist_ok=True)


def build_tiny_vla(shape: RobotShape, seed: int) -> "tuple[VLAForCausalLM, PreTrainedTokenizerBase]":
    """Builds a randomly initialised policy, deterministic for a seed, and its tokenizer."""
    register_vla()
    tokenizer, ids = build_word_tokenizer(shape.bins, shape.num_queries, shape.max_positions)
    config = VLAConfig(
        vocab_size=len(tokenizer), hidden_size=shape.hidden, intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=shape.max_positions, tie_word_embeddings=False, initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        state_size=shape.state_size, state_tokens=shape.state_tokens, image_size=shape.image_size,
        action_size=shape.action_size, chunk=shape.chunk, action_bins=shape.bins, action_head=shape.head,
        placeholder_token_id=ids.placeholder, query_token_ids=list(ids.queries) or None,
        actions_low=list(shape.low) or None, actions_high=list(shape.high) or None,
        flow=shape.flow.model_dump() if shape.head == FLOW else None,
    )  # fmt: skip
    config.architectures = [VLAForCausalLM.__name__]
    with TRANSFORMERS_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VLAForCausalLM(config).float()
        _curve_embeddings(model.model.embed_tokens.weight, shape.bins)
        if shape.output_initializer_range is not None:
            nn.init.normal_(model.lm_head.weight, std=shape.output_initializer_range)
    return model, tokenizer


@torch.no_grad()
def _curve_embeddings(table: Tensor, bins: int) -> None:
    """Gives neighbouring action bins similar embeddings: random mixtures of smooth curves over the range."""
    # transformers replaces torch.linspace by a CPU version while another thread loads a model, so the device is
    # explicit.
    place = torch.linspace(-1, 1, bins, device=table.device)[:, None]
    turns = torch.tensor([FREQUENCIES], device=table.device) * math.pi
    curves = torch.cat([place * 2, torch.sin(place * turns), torch.cos(place * turns)], 1)
    mixture = torch.randn(curves.shape[1], table.shape[1], device=table.device) * 0.15 / math.sqrt(curves.shape[1])
    table[:bins] = curves @ mixture
