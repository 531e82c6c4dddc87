"""SmolVLA (arXiv 2506.01844), pi0 (arXiv 2410.24164) and pi0.5 (arXiv 2504.16054), from LeRobot's published folders.

A policy reads pictures, a prompt and a state once (`read`), then computes the velocity of noisy actions at a time
(`velocity`). `sample` integrates the velocity from noise to a chunk, without further noise. `draw` and `logprobs` are
the stochastic sampler of interlace/models/flow.py and its densities, for RL. Only code of this package is executed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from interlace.core.errors import UserError
from interlace.core.guide import Guide
from interlace.core.types import FloatArray
from interlace.models.action_head import HALF_LOG_TAU
from interlace.models.config import FlowConfig
from interlace.models.flow_guidance import guide_velocity
from interlace.robots.models.flow_streams import (
    KeysValues,
    NormKind,
    StreamShape,
    TokenStream,
    block_mask,
    count_layers,
    parse_layer,
)
from interlace.robots.models.lerobot_folder import CONFIG, STATE, WEIGHTS, LerobotFolder, read_folder, refuse_damaged
from interlace.robots.models.vision import PaliGemmaEncoder, PicturesEncoder, SmolVLMEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, SmolVLMConfig

PREFIXES = {
    "smolvla": ("model.vlm_with_expert.vlm.model.", "text_model.", "model.vlm_with_expert.lm_expert."),
    "pi0": (
        "model.paligemma_with_expert.paligemma.model.",
        "language_model.",
        "model.paligemma_with_expert.gemma_expert.model.",
    ),
}
"""Family -> name prefixes of the reading model's weights, of its text part, and of the expert."""
GEMMA_HEADS, GEMMA_EPSILON = 8, 1e-6
MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0
"""Shortest and longest period of a time's features."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensed:
    """Observations in the network's input format. B rows."""

    pictures: Sequence[Tensor]
    """[B, 3, side, side] picture of each camera, from -1 to 1."""
    token_ids: Tensor
    """[B, T] tokens of the prompt."""
    is_real: Tensor
    """[B, T] False on padding."""
    state: Tensor
    """[B, F] state, normalised and padded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """Keys and values of observations, read by every denoising step."""

    layers: Sequence[KeysValues]
    is_real: Tensor
    """[B, P] False on padding."""
    state: Tensor


class FlowVLA(nn.Module):
    """Published flow-matching policy."""

    def __init__(self, folder: LerobotFolder, weights: Mapping[str, Tensor], vlm: "SmolVLMConfig | None") -> None:
        """weights: the folder's weights, by name. vlm: configuration of SmolVLA's language model; None for pi0."""
        super().__init__()
        self.folder, self.schedule = folder, folder.schedule
        reading, text, expert = PREFIXES["smolvla" if folder.kind == "smolvla" else "pi0"]
        of_reading, of_text, of_expert = (_select_prefix(weights, name) for name in (reading, reading + text, expert))
        if vlm is not None:
            sizes: Any = vlm.text_config
            epsilon = sizes.rms_norm_eps
            shape = StreamShape(heads=sizes.num_attention_heads, norm="llama", epsilon=epsilon, uses_gelu=False)
            self.encoder: PicturesEncoder = SmolVLMEncoder(vlm)
            expert_shape = shape
            # Layers of the language model above the expert's last layer are not used.
            count = count_layers(of_expert)
            of_text = {name: tensor for name, tensor in of_text.items() if parse_layer(name) < count}
        else:
            shape = StreamShape(heads=GEMMA_HEADS, norm="gemma", epsilon=GEMMA_EPSILON, uses_gelu=True)
            kind: NormKind = "adaptive" if folder.kind == "pi05" else "gemma"
            expert_shape = StreamShape(heads=GEMMA_HEADS, norm=kind, epsilon=GEMMA_EPSILON, uses_gelu=True)
            self.encoder = PaliGemmaEncoder(of_reading, int(folder.settings.get("vision_heads", 16)))
        self.text, self.expert = TokenStream(shape, of_text), TokenStream(expert_shape, of_expert)
        embedding = _find_embedding(of_text, weights, reading)
        self.embed_tokens = nn.Embedding(*embedding.shape)
        names = [name for name in _HEADS if f"model.{name}.weight" in weights]
        self.heads = nn.ModuleDict({name: nn.Linear(*weights[f"model.{name}.weight"].shape[::-1]) for name in names})
        given = {f"text.{name}": tensor for name, tensor in of_text.items()}
        given |= {f"expert.{name}": tensor for name, tensor in of_expert.items()}
        given |= {f"encoder.{name}": tensor for name, tensor in self.encoder.published(of_reading).items()}
        given |= {f"heads.{name}": tensor for name, tensor in _select_prefix(weights, "model.").items()}
        self._load_weights(given | {"embed_tokens.weight": embedding})

    def read(self, sensed: Sensed) -> Prefix:
        """Computes the keys and values of each layer for an observation."""
        words = self.embed_tokens(sensed.token_ids)
        words = words * math.sqrt(words.shape[-1])
        pictures = [self.encoder(picture) for picture in sensed.pictures]
        if self.folder.kind == "smolvla":
            pictures = [rows * math.sqrt(rows.shape[-1]) for rows in pictures]
        rows, real = [*pictures, words], [rows.new_ones(rows.shape[:2]).bool() for rows in pictures]
        real.append(sensed.is_real.bool())
        begins = [torch.zeros_like(each, dtype=torch.long) for each in real]
        if self.folder.kind == "smolvla":
            rows.append(self.heads["state_proj"](sensed.state)[:, None])
            real.append(real[0].new_ones(len(words), 1))
            begins.append(torch.ones(len(words), 1, dtype=torch.long, device=words.device))
        is_real = torch.cat(real, 1)
        positions = is_real.long().cumsum(1) - 1
        mask = block_mask(is_real, torch.cat(begins, 1))
        return Prefix(layers=self.text.read(torch.cat(rows, 1), positions, mask), is_real=is_real, state=sensed.state)

    def velocity(self, prefix: Prefix, actions: Tensor, time: Tensor) -> Tensor:
        """Computes noise - action [B, K, P] for noisy actions [B, K, P] at times [B]; at time 1 they are noise."""
        rows, condition = self._embed_actions(prefix, actions, time)
        begins = torch.zeros(rows.shape[:2], dtype=torch.long, device=rows.device)
        begins[:, : rows.shape[1] if self.folder.kind == "smolvla" else rows.shape[1] - actions.shape[1] + 1] = 1
        own = block_mask(torch.ones_like(begins).bool(), begins)
        before = prefix.is_real[:, None].expand(-1, rows.shape[1], -1)
        offset = prefix.is_real.long().sum(1, keepdim=True)
        written = self.expert.write(
            rows,
            offset + torch.arange(rows.shape[1], device=rows.device),
            torch.cat([before, own], 2),
            prefix.layers,
            self_every=self._self_every(),
            condition=condition,
        )
        return self.heads["action_out_proj"](written[:, -actions.shape[1] :]).float()

    @torch.no_grad()
    def sample(self, sensed: Sensed, noise: Tensor, guides: Sequence[Guide | None] = ()) -> Tensor:
        """Returns chunks [B, K, P], by Euler steps from noise [B, K, P]. guides: [B] known parts, or empty."""
        prefix, x = self.read(sensed), noise
        for step in range(self.schedule.config.steps):
            velocity = partial(self._velocity_at, prefix, step=step)
            found = guide_velocity(self.schedule, step, x, velocity, guides) if guides else velocity(x)
            x = self.schedule.deterministic(step, x, found)
        return x

    @torch.no_grad()
    def draw(self, sensed: Sensed, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draws chains [B, N + 1, K, P] with the stochastic sampler, and their log-probs, 0 on padding.

        noise: [B, N + 1, K, P] standard normal numbers, of which the first are the start of the chain.
        """
        prefix, states = self.read(sensed), [noise[:, 0]]
        for step in range(self.schedule.config.steps):
            mean, std = self.schedule.transition(step, states[-1], self._velocity_at(prefix, states[-1], step))
            states.append(mean + std * noise[:, step + 1])
        chain = torch.stack(states, 1)
        return chain, self._logprobs(prefix, chain)

    def logprobs(self, sensed: Sensed, chain: Tensor) -> Tensor:
        """Computes the log-probs [B, N + 1, K, P] of chains, with gradient; 0 on padding."""
        return self._logprobs(self.read(sensed), chain)

    def _logprobs(self, prefix: Prefix, chain: Tensor) -> Tensor:
        found = [-0.5 * chain[:, 0] ** 2 - HALF_LOG_TAU]
        for step in range(self.schedule.config.steps):
            velocity = self._velocity_at(prefix, chain[:, step], step)
            mean, std = self.schedule.transition(step, chain[:, step], velocity)
            found.append(-0.5 * ((chain[:, step + 1] - mean) / std) ** 2 - math.log(std) - HALF_LOG_TAU)
        is_real = torch.arange(chain.shape[-1], device=chain.device) < self.schedule.size
        return torch.stack(found, 1) * is_real

    def _velocity_at(self, prefix: Prefix, x: Tensor, step: int) -> Tensor:
        return self.velocity(prefix, x, torch.full((len(x),), self.schedule.network_time(step), device=x.device))

    def _self_every(self) -> int:
        settings = self.folder.settings
        if self.folder.kind != "smolvla" or settings.get("attention_mode", "cross_attn") != "cross_attn":
            return 1
        return int(settings.get("self_attn_every_n_layers", 2))

    def _embed_actions(self, prefix: Prefix, actions: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the suffix's tokens, and the condition of adaptive norms (pi0.5)."""
        rows = self.heads["action_in_proj"](actions)
        features = time_features(time, rows.shape[-1]).to(rows.dtype)
        if self.folder.kind == "pi05":
            return rows, F.silu(self.heads["time_mlp_out"](F.silu(self.heads["time_mlp_in"](features))))
        both = torch.cat([rows, features[:, None].expand_as(rows)], -1)
        rows = self.heads["action_time_mlp_out"](F.silu(self.heads["action_time_mlp_in"](both)))
        if self.folder.kind == "pi0":
            rows = torch.cat([self.heads["state_proj"](prefix.state)[:, None], rows], 1)
        return rows, None

    @torch.no_grad()
    def _load_weights(self, given: Mapping[str, Tensor]) -> None:
        """Copies weights by this module's names. Raises UserError for one that is missing or has another shape."""
        for name, parameter in self.state_dict().items():
            if name not in given:
                raise UserError(f"policy folder {str(self.folder.path)!r} lacks the weight {name}: is it whole?")
            if given[name].shape != parameter.shape:
                raise UserError(
                    f"policy folder {str(self.folder.path)!r}: {name} has shape {list(given[name].shape)}, and the "
                    f"settings of its config.json need {list(parameter.shape)}. They do not belong together."
                )
            parameter.copy_(given[name])


class FlowVLAPolicy:
    """Acting policy: converts observations of a simulator to actions, one chunk at a time."""

    def __init__(self, network: FlowVLA, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.network, self.folder, self._tokenizer = network.eval(), network.folder, tokenizer
        self._queue: list[FloatArray] = []
        """Remaining actions of the current chunk."""

    def reset(self) -> None:
        self._queue.clear()

    def sense(self, observation: Mapping[str, NDArray[np.generic]], task: str) -> Sensed:
        """Converts an observation to inputs: `state`, and a picture [H, W, 3] for each camera by its name in the
        folder.

        Raises UserError for a camera that the observation lacks.
        """
        folder = self.folder
        for camera in folder.cameras:
            if camera not in observation:
                raise UserError(
                    f"the policy reads the camera {camera!r}, and the simulator gives {sorted(observation)}. Rename "
                    "its pictures, or take a policy of these cameras."
                )
        state = folder.state.normalize(np.asarray(observation["state"], np.float32))
        ids = self._tokenizer(folder.prompt(task, state), truncation=True, max_length=folder.num_text_tokens)
        tokens = torch.tensor([ids["input_ids"]])
        pictures = [folder.picture(np.asarray(observation[camera], np.uint8)) for camera in folder.cameras]
        return Sensed(
            pictures=[torch.from_numpy(picture)[None] for picture in pictures],
            token_ids=tokens,
            is_real=torch.ones_like(tokens).bool(),
            state=torch.from_numpy(folder.pad_state(state))[None],
        )

    def act(self, observation: Mapping[str, NDArray[np.generic]], task: str, draw: np.random.Generator) -> FloatArray:
        """Returns the next action, [A]. Runs the network once the chunk's actions have been executed."""
        if not self._queue:
            chunk = self.network.sample(self.sense(observation, task), torch.from_numpy(self.draw_noise(draw)[None]))[0]
            restored = self.folder.restore_actions(chunk.numpy(), np.asarray(observation["state"], np.float32))
            self._queue = list(restored[: self.folder.executed])
        return self._queue.pop(0)

    def draw_noise(self, draw: np.random.Generator) -> FloatArray:
        """Draws the start of a chunk's chain, [K, P]."""
        schedule = self.network.schedule
        return draw.normal(size=(schedule.chunk, schedule.padded_size)).astype(np.float32)


def load_flow_vla(path: Path, sampler: FlowConfig | None = None) -> FlowVLA:
    """Loads a policy folder. sampler: see read_folder(). Raises UserError if the folder is not a complete policy."""
    folder = read_folder(path, sampler)
    file = path / WEIGHTS
    if not file.is_file():
        raise UserError(f"policy folder {str(path)!r} has no {WEIGHTS}.")
    with refuse_damaged(file):
        weights = {name: tensor.float() for name, tensor in load_file(file).items()}
    vlm = None
    if folder.kind == "smolvla":
        from transformers import SmolVLMConfig

        named = Path(str(folder.settings.get("vlm_model_name", ""))).expanduser()
        config = (named if named.is_absolute() else path / named) / CONFIG
        if not config.is_file():
            raise UserError(
                f"policy folder {str(path)!r} names its language model {str(named)!r} (vlm_model_name), and there is "
                "no such folder. Copy config.json and the tokenizer of that model into a folder, and name it there."
            )
        vlm = SmolVLMConfig.from_dict(json.loads(config.read_text(encoding="utf-8")))
    if STATE not in folder.settings.get("input_features", {}):
        raise UserError(f"policy folder {str(path)!r} reads no {STATE}: policies without a state are not supported.")
    return FlowVLA(folder, weights, vlm)


def time_features(time: Tensor, size: int) -> Tensor:
    """Returns sines and cosines [B, size] of times [B], with periods from MIN_PERIOD to MAX_PERIOD."""
    share = torch.linspace(0, 1, size // 2, dtype=torch.float64, device=time.device)
    periods = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** share
    angles = time[:, None].double() * (2 * math.pi / periods)
    return torch.cat([angles.sin(), angles.cos()], 1).float()


_HEADS = (
    "state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out", "time_mlp_in",
    "time_mlp_out",
)  # fmt: skip


def _select_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _find_embedding(of_text: Mapping[str, Tensor], weights: Mapping[str, Tensor], reading: str) -> Tensor:
    """Returns the embedding table, which files omit if it is tied to the output layer."""
    head = f"{reading.removesuffix('model.')}lm_head.weight"
    found = of_text.get("embed_tokens.weight", weights.get(head))
    if found is None:
        raise UserError(f"the policy's {WEIGHTS} has no table of embeddings ({head} or embed_tokens).")
    return found
