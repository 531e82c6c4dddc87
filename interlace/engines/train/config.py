"""Settings of the train engines: the recipe's sections `actor`, `critic` and `optimizer`. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.training import UpdateConfig
from interlace.core.types import SamplingParams

Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""Share of a moment that an optimizer step keeps."""
TOKENS_PER_MICROBATCH = 8192
"""Default of the recipe's and of an engine that is made without a recipe."""


class OptimizerConfig(Config):
    """AdamW (arXiv 1711.05101), the gradient's bound and the learning rate over time."""

    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices only, not to biases and norms."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """The gradient is scaled down to this L2 norm; None leaves it as it is."""
    max_failed_updates: int = Field(default=8, ge=1)
    """An update that is not finite, or would leave nothing of the weights, is dropped; this number in a row, over more
    than one step, ends the run with the weights as they were before: nothing changes any more that could mend them."""
    warmup_steps: int = Field(default=0, ge=0)
    """The rate rises linearly over this many optimizer steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the rate after the warm-up: stays, or falls to `min_lr_ratio` at `total_steps`."""
    total_steps: int | None = Field(default=None, ge=1)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _a_fall_needs_an_end(self) -> Self:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps, the optimizer step at which it ends")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps ({self.total_steps}) must be more than warmup_steps ({self.warmup_steps})")
        return self

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps is None:
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)


class LoraConfig(Config):
    """Which layers get an adapter, and how large it is."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    """The adapter counts alpha / rank times."""
    target_modules: tuple[str, ...] | None = None
    """Names of linear layers, such as q_proj; None takes all but the output head."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's input that is dropped while training. Above 0, trained log-probs are no longer those that
    were sampled under, and the result depends on how a batch is split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Sizes of the mesh that a model's ranks make. Ranks count along the last axis first."""

    replicate: int = 1
    """Copies of the model, each trained on samples of its own."""
    shard: int = 1
    """Ranks of one copy among which samples are dealt, and each layer's weights cut up."""
    context: int = 1
    """Ranks that share each row of tokens."""
    tensor: int = 1
    """Ranks that share each matrix of a layer, and its heads."""
    expert: int = 1
    """Ranks of one copy among which the experts of each layer are dealt out: no axis of its own, part of `shard` x
    `context`."""

    @property
    def num_ranks(self) -> int:
        """Returns the ranks of the whole mesh."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def rest(self) -> int:
        """Returns the ranks of one copy among which each dealt expert is cut up."""
        return self.shard * self.context // self.expert

    @property
    def copies(self) -> int:
        """Returns the neighbouring ranks that are called with the same samples."""
        return self.context * self.tensor


class TrainedConfig(Config):
    """How a model is trained by several ranks."""

    ranks: int | None = Field(default=None, ge=1)
    """Processes, a device or more each: weights, gradients and moments are cut into as many parts. None takes one for
    each GPU of its placement; on CPU cores as many as the sizes below ask for, which is one by default."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices and heads, and the vocabulary. The others get other samples."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share each row of tokens; around attention they exchange tokens for heads, which it has to divide."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks with samples of their own among which the experts of a mixture are dealt out, whole ones to each; tokens
    travel to their experts. It divides the ranks of a copy of the model."""
    replicate: int = Field(default=1, ge=1)
    """Copies of the model among the ranks: weights are cut up within a copy, gradients summed over all."""
    reshard: bool = True
    """Flag for several ranks: each gives a layer's weights up right after use, as ZeRO's stage 3. False keeps whole
    weights and a whole gradient from a minibatch's first forward to its end: faster, for models that fit so."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward: less memory, about a third more time."""

    @model_validator(mode="after")
    def _experts_are_dealt_once(self) -> Self:
        if self.expert_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"expert_parallel={self.expert_parallel} with tensor_parallel={self.tensor_parallel}: ranks that share "
                "layers deal the experts out among them already. Set one of them to 1"
            )
        return self

    @property
    def least_ranks(self) -> int:
        """Returns the ranks that the mesh's sizes ask for; all ranks are a multiple of it."""
        return self.tensor_parallel * math.lcm(self.context_parallel, self.expert_parallel) * self.replicate

    def mesh_shape(self, num_ranks: int, where: str = "actor") -> MeshShape:
        """Returns the mesh of `num_ranks` ranks. Raises UserError where the sizes do not divide it.

        where: the recipe's section, for the message.
        """
        if num_ranks % self.least_ranks:
            raise UserError(
                f"{where}: {num_ranks} ranks cannot be laid out as tensor_parallel={self.tensor_parallel} x "
                f"context_parallel={self.context_parallel} x replicate={self.replicate}, experts dealt out to "
                f"expert_parallel={self.expert_parallel}. Set {where}.ranks (or the number of its devices) to a "
                f"multiple of {self.least_ranks}, or make those smaller."
            )
        return MeshShape(
            replicate=self.replicate,
            shard=num_ranks // (self.tensor_parallel * self.context_parallel * self.replicate),
            context=self.context_parallel,
            tensor=self.tensor_parallel,
            expert=self.expert_parallel,
        )


class SpeedupConfig(Config):
    """Libraries that make a policy's layers faster."""

    compile: bool = False
    """Compile each layer with torch.compile: a minute or more at the first step, faster ones after it."""
    liger: bool = False
    """Use Liger's kernels, on a GPU."""


class ActorConfig(SpeedupConfig, TrainedConfig):
    """The trained policy."""

    lora: LoraConfig | None = None
    """Train an adapter and leave the model as it is; None trains all weights."""

    @model_validator(mode="after")
    def _shared_layers_are_plain(self) -> Self:
        for name, wanted in (("lora", self.lora is not None), ("compile", self.compile), ("liger", self.liger)):
            shared = next((each for each in ("tensor_parallel", "expert_parallel") if getattr(self, each) > 1), None)
            if wanted and shared:
                raise ValueError(
                    f"{name} with {shared}={getattr(self, shared)}: ranks share plain layers alone. Leave {name} out, "
                    f"or set {shared}=1"
                )
        return self

    @model_validator(mode="after")
    def _noise_is_drawn_once(self) -> Self:
        if self.gradient_checkpointing and self.lora and self.lora.dropout:
            raise ValueError(
                "gradient_checkpointing would draw lora.dropout's noise a second time; set one of them to its default"
            )
        return self


class CriticConfig(TrainedConfig):
    """The model that judges each token, where the algorithm needs one.

    A value model starts as the policy's body with a new head, a process reward model as the reference.
    """

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    value_clip: float | None = Field(default=0.5, gt=0)
    """A new value counts as at most this far from the one the advantages were made with; None leaves it free."""
    process_reward_scale: float = Field(default=0.05, gt=0)
    """beta of a process reward model: its rewards are beta log(model / reference)."""
    success_reward: float = 0.5
    """A response with more reward than this counts as right when a process reward model is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of a policy's engine: its own sections, and what follows from others."""

    actor: ActorConfig = ActorConfig()
    update: UpdateConfig = UpdateConfig()
    tokens_per_microbatch: int = TOKENS_PER_MICROBATCH
    """Prompt and response tokens of one forward, a prompt that samples share counted once, or padding counted where
    rows are padded; a longer sample has one to itself."""
    temperature: float = 1.0
    """Temperature of sampling: log-probs are those of softmax(logits / temperature)."""
    served_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the engines that generate with them."""


def training_temperature(params: SamplingParams) -> float:
    """Returns the temperature that training shares with sampling.

    Log-probs are only comparable under one distribution. Temperature is part of it; what cuts or bends the vocabulary
    while sampling cannot be repeated for another policy, so it is refused (UserError), as is greedy sampling.
    """
    plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    bent = [f"{name}={getattr(params, name)}" for name, neutral in plain.items() if getattr(params, name) != neutral]
    bent += ["logit_bias"] if params.logit_bias else []
    if bent:
        raise UserError(
            f"sampling with {', '.join(bent)} draws from a distribution that training cannot recompute, "
            "so importance ratios would be wrong. Train with temperature only; keep the rest for evaluation."
        )
    if params.temperature == 0:
        raise UserError("temperature=0 is greedy: there is no distribution to train on. Use a temperature above 0.")
    return params.temperature
