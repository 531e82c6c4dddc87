"""Settings of the train engines: the recipe's sections `actor`, `critic` and `optimizer`. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.training import UpdateConfig
from interlace.core.types import SamplingParams

Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a moment: the fraction kept at each optimizer step."""
TOKENS_PER_MICROBATCH = 8192
"""Default of the recipe, and of an engine built without a recipe."""


class OptimizerConfig(Config):
    """AdamW (arXiv 1711.05101), gradient clipping and the learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices only, not to biases and norms."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """The gradient is scaled down to this L2 norm. If None, the gradient is not clipped."""
    max_failed_updates: int = Field(default=8, ge=1)
    """Failed updates in a row, over more than one step, after which the run ends with the weights unchanged.

    An update fails if it is not finite or would erase the weights; it is dropped. After this number of failures
    nothing is left that could repair the run."""
    warmup_steps: int = Field(default=0, ge=0)
    """The rate rises linearly over this many optimizer steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up: constant, or falling to `min_lr_ratio` at `total_steps`."""
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer step at which the fall ends, `steps` x `minibatches` x `epochs` for a fall over the whole run."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` at the end of the fall and after it. At 0, more updates than `total_steps` are refused."""

    @model_validator(mode="after")
    def _check_total_steps(self) -> Self:
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
    """Layers that get an adapter, and the size of the adapter."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: tuple[str, ...] | None = None
    """Names of linear layers, such as q_proj. If None, all linear layers but the output head."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the adapter's input during training. Above 0, trained log-probs differ from sampled log-probs,
    and the result depends on the split of a batch into micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Sizes of the device mesh of a model's ranks. Ranks are numbered along the last axis first."""

    replicate: int = 1
    """Copies of the model; each copy trains on different samples."""
    shard: int = 1
    """Ranks of one copy that split the samples and the weights of each layer."""
    context: int = 1
    """Ranks that share each row of tokens."""
    tensor: int = 1
    """Ranks that share each matrix of a layer and its attention heads."""
    expert: int = 1
    """Ranks of one copy that split the experts of each layer. This is not a separate axis but part of `shard` x
    `context`."""

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def rest(self) -> int:
        """Returns the number of ranks that split each expert of one copy."""
        return self.shard * self.context // self.expert

    @property
    def copies(self) -> int:
        """Returns the number of neighbouring ranks that are called with the same samples."""
        return self.context * self.tensor


class TrainedConfig(Config):
    """Settings of a model that several ranks train."""

    ranks: int | None = Field(default=None, ge=1)
    """Processes, each with one or more devices. Weights, gradients and moments are split into as many parts. If None,
    one process for each GPU of the placement; on CPU cores, the product of the sizes below, which is 1 by default."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices and heads, and the vocabulary. Other ranks get other samples."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share each row of tokens. Around attention they exchange tokens for heads, so this number must divide
    the number of heads."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks, each with different samples, that split the experts of a mixture; each expert is whole on one rank, and
    tokens are sent to their experts. This number must divide the ranks of one copy of the model."""
    replicate: int = Field(default=1, ge=1)
    """Copies of the model among the ranks. Weights are split within a copy; gradients are summed over all copies."""
    reshard: bool = True
    """Flag for several ranks: each rank frees a layer's gathered weights right after use, as ZeRO stage 3. If False,
    whole weights and a whole gradient stay from a minibatch's first forward pass to its end: faster, for models that
    fit."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""

    @model_validator(mode="after")
    def _check_expert_parallel(self) -> Self:
        if self.expert_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"expert_parallel={self.expert_parallel} with tensor_parallel={self.tensor_parallel}: ranks that share "
                "layers deal the experts out among them already. Set one of them to 1"
            )
        return self

    @property
    def least_ranks(self) -> int:
        """Returns the smallest number of ranks for the mesh's sizes; the number of ranks must be a multiple of it."""
        return self.tensor_parallel * math.lcm(self.context_parallel, self.expert_parallel) * self.replicate

    def mesh_shape(self, num_ranks: int, where: str = "actor") -> MeshShape:
        """Returns the mesh of `num_ranks` ranks. Raises UserError if `num_ranks` is not a multiple of `least_ranks`.

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
    """Compile each layer with torch.compile: a minute or more at the first step, faster steps afterwards."""
    liger: bool = False
    """Use Liger's kernels, on a GPU."""


class ActorConfig(SpeedupConfig, TrainedConfig):
    """The trained policy."""

    lora: LoraConfig | None = None
    """Adapter to train; the other weights stay frozen. If None, all weights are trained."""

    @model_validator(mode="after")
    def _check_shared_layers(self) -> Self:
        for name, wanted in (("lora", self.lora is not None), ("compile", self.compile), ("liger", self.liger)):
            shared = next((each for each in ("tensor_parallel", "expert_parallel") if getattr(self, each) > 1), None)
            if wanted and shared:
                raise ValueError(
                    f"{name} with {shared}={getattr(self, shared)}: ranks share plain layers alone. Leave {name} out, "
                    f"or set {shared}=1"
                )
        return self

    @model_validator(mode="after")
    def _refuse_repeated_dropout(self) -> Self:
        if self.gradient_checkpointing and self.lora and self.lora.dropout:
            raise ValueError(
                "gradient_checkpointing would draw lora.dropout's noise a second time; set one of them to its default"
            )
        return self


class CriticConfig(TrainedConfig):
    """The model that judges each token, for algorithms that need one.

    A value model starts as the policy's body with a new head, a process reward model as the reference.
    """

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    value_clip: float | None = Field(default=0.5, gt=0)
    """PPO value clip range around the value that the advantages were estimated with. If None, no clipping."""
    process_reward_scale: float = Field(default=0.05, gt=0)
    """beta of a process reward model: its rewards are beta log(model / reference)."""
    success_reward: float = 0.5
    """A response counts as correct in the training of a process reward model if its reward is above this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of a policy's engine: its own sections, and values derived from other sections."""

    actor: ActorConfig = ActorConfig()
    update: UpdateConfig = UpdateConfig()
    tokens_per_microbatch: int = TOKENS_PER_MICROBATCH
    """Prompt and response tokens of one forward pass. A prompt shared by samples counts once; if rows are padded,
    padding counts too. A longer sample gets its own micro-batch."""
    temperature: float = 1.0
    """Temperature of sampling: log-probs are computed from softmax(logits / temperature)."""
    served_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the rollout engines."""
    num_top: int = 0
    """Most probable tokens of a teacher at each place whose log-probs the loss needs."""
    num_ids: int | None = None
    """Number of ids, from 0, over which log-probs are normalized; None for all outputs of the model. Models may have
    more outputs than the tokenizer has tokens, and the native engine never samples these."""


def training_temperature(params: SamplingParams) -> float:
    """Returns the temperature that training shares with sampling.

    Log-probs are comparable only under one distribution, and temperature is part of it. Sampling settings that truncate
    or reshape the distribution cannot be recomputed for another policy, so they raise UserError; so does greedy
    sampling.
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
