"""Configuration of policies in the layout of OpenVLA's folders: sizes, pictures, statistics and actions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from transformers import LlamaConfig

from interlace.core.errors import UserError, nearest
from interlace.models.action_tokens import action_statistics, check_ranges, range_names
from interlace.models.config import GAUSSIAN, OPENVLA_TYPE
from interlace.models.inputs import PictureSteps, StateScaling
from interlace.robots.models import openvla_oft as oft

PROCESSOR = "preprocessor_config.json"
CROP_AREA = 0.9
"""Share of a picture's area that remains, for policies that were trained with random crops."""


PictureOrigin = Literal["openvla", "processor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShape:
    """Sizes of an image tower: a vision transformer with timm's parameter names."""

    width: int
    depth: int
    """Number of layers; the second-to-last one provides the features."""
    heads: int
    mlp: int
    patch: int = 14
    classes: int = 0
    """Number of class tokens, 0 or 1."""
    registers: int = 0
    scales: bool = False
    """True if learned numbers scale each layer's branches."""


TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerShape(
        width=1024, depth=24, heads=16, mlp=4096, classes=1, registers=4, scales=True
    ),
    "vit_so400m_patch14_siglip_224": TowerShape(width=1152, depth=27, heads=16, mlp=4304),
}
"""Sizes by timm's name."""


class OpenVLAConfig(LlamaConfig):
    """Configuration of a Llama body, observations and actions; OpenVLA stores the body's sizes in `text_config`."""

    model_type = OPENVLA_TYPE
    timm_model_ids: list[str] | None = None
    tower_shapes: list[dict[str, Any]] | None = None
    """Sizes of the towers; if None, timm_model_ids names towers of TOWERS."""
    image_sizes: list[int] | None = None
    image_means: list[list[float]] | None = None
    """[towers, 3] means of the image processor, for channels between 0 and 1."""
    image_stds: list[list[float]] | None = None
    num_images: int = 1
    """Number of cameras that the policy reads; 2 adds the wrist camera."""
    picture_origin: PictureOrigin | None = None
    """Preparation of pictures: `openvla` as in OpenVLA's evaluation code (JPEG, lanczos), `processor` only by the
    folder's image processor, as in RLinf. If None, `openvla` for data sets of LIBERO and Bridge, else `processor`."""
    center_crop: bool | None = None
    """True if pictures are cropped, as after training with random crops. If None, True for LIBERO with `openvla`."""
    norm_stats: dict[str, Any] | None = None
    """Data set -> `action`, with `q01`, `q99` and `mask`, and `proprio`. Of ALOHA in OpenVLA-OFT, `min` and `max`."""
    unnorm_key: str | None = None
    """Data set whose statistics scale the actions; may be None if there is only one."""
    embodiment: str | None = None
    """Robot that acts (interlace/robots/models/embodiments.py); if None, the name of the data set determines it."""
    action_scale: float = 1.0
    """Factor of the movement, for WidowX."""
    n_action_bins: int = 256
    pad_to_multiple_of: int = 64
    """Number of embeddings after the vocabulary; the last one is the placeholder."""
    state_size: int = 0
    state_tokens: int = 1
    parallel_decoding: bool = False
    """True for OpenVLA-OFT, which decodes a chunk in one pass."""
    is_causal: bool = True
    """False if tokens attend in both directions, as in OpenVLA-OFT."""
    num_actions_chunk: int = 1
    action_head: str = "tokens"
    """Head of the actions. `gaussian`: regression with a learned standard deviation."""
    head_width: int = 0
    action_log_std: float = -2.0
    """Initial logarithm of that standard deviation, in units of half an action's range."""
    last_prompt_id: int = oft.SPACE_TOKEN
    """Last token of an OpenVLA-OFT prompt, whose output is the first number of a chunk."""

    @classmethod
    def from_dict(  # house: the signature is transformers'
        cls, config_dict: dict[str, Any], **given: Any
    ) -> "OpenVLAConfig":
        """Reads either layout, and the folder's other files: image processor, statistics and parts of OpenVLA-OFT."""
        flat = {name: value for name, value in (config_dict.get("text_config") or {}).items() if name != "model_type"}
        flat |= {name: value for name, value in config_dict.items() if name not in ("text_config", "auto_map")}
        if source := str(given.get("name_or_path") or ""):
            flat |= _folder_settings(flat, Path(source))
        config: OpenVLAConfig = super().from_dict(flat, **given)
        return config

    @property
    def image_size(self) -> int:
        """Side of the camera's image, in pixels."""
        return (self.image_sizes or [224])[0]

    @property
    def image_tokens(self) -> int:
        """Number of patches; each becomes one vector."""
        return (self.image_size // self.towers[0].patch) ** 2

    @property
    def placeholder_token_id(self) -> int:
        """Token that occurs in no text."""
        return self.vocab_size - 1

    @property
    def zero_token_id(self) -> int:
        """Token that occurs in no text, with an embedding of 0: the placeholder of a number to decode."""
        return self.vocab_size - 2

    @property
    def action_size(self) -> int:
        """Size of an action."""
        name, actions = action_statistics(self, self.unnorm_key)
        return len(actions[range_names(self, name)[0]])

    @property
    def query_token_ids(self) -> list[int] | None:
        """Placeholder tokens of a chunk that is decoded in parallel; None for autoregressive decoding."""
        if not self.parallel_decoding:
            return None
        return [self.last_prompt_id] + [self.zero_token_id] * (self.num_actions_chunk * self.action_size - 1)

    @property
    def picture_steps(self) -> PictureSteps:
        """Preparation of pictures."""
        data_set = (self.unnorm_key or next(iter(self.norm_stats or {}), "")).lower()
        is_libero = "libero" in data_set
        if self.picture_origin not in (None, *get_args(PictureOrigin)):
            raise UserError(
                f"picture_origin = {self.picture_origin!r} in the policy's config.json: it must be one of "
                f"{', '.join(map(repr, get_args(PictureOrigin)))}."
            )
        origin = self.picture_origin or ("openvla" if is_libero or "bridge" in data_set else "processor")
        crops = self.center_crop if self.center_crop is not None else is_libero and origin == "openvla"
        return PictureSteps(
            side=self.image_size,
            resize="lanczos" if origin == "openvla" else "bicubic",
            jpeg=origin == "openvla",
            crop_area=CROP_AREA if crops else 1.0,
        )

    @property
    def state_scaling(self) -> StateScaling | None:
        """Scaling of the state; None if the policy reads no state. Raises UserError without its statistics."""
        if not self.state_size:
            return None
        name, _ = action_statistics(self, self.unnorm_key)
        found = (self.norm_stats or {})[name].get("proprio", {})
        ends = range_names(self, name)
        if missing := [key for key in ends if key not in found]:
            raise UserError(
                f"the policy reads a state, and norm_stats[{name!r}] has no proprio {missing[0]} to scale it by. Copy "
                f"{oft.STATISTICS} of the policy's training into its folder."
            )
        check_ranges(f"norm_stats[{name!r}]['proprio']", found, ends)
        low, high = (np.asarray(found[key], np.float32) for key in ends)
        scaled = np.asarray(found.get("mask", np.ones(len(low), np.bool_)), np.bool_)
        return StateScaling(low=low, high=high, scaled=scaled)

    @property
    def towers(self) -> Sequence[TowerShape]:
        """Sizes of the towers. Raises UserError for an unknown tower."""
        if self.tower_shapes:
            return [TowerShape(**shape) for shape in self.tower_shapes]
        names = self.timm_model_ids or []
        for name in names:
            if name not in TOWERS:
                raise UserError(f"OpenVLA's image tower {name!r} is not known here.{nearest(name, TOWERS)}")
        return [TOWERS[name] for name in names]


def _folder_settings(flat: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings in a folder's files other than config.json. flat: settings of config.json."""
    found: dict[str, Any] = {}
    if (folder / PROCESSOR).is_file():
        processor = json.loads((folder / PROCESSOR).read_text(encoding="utf-8"))
        found |= {"image_means": processor["means"], "image_stds": processor["stds"]}
    if statistics := oft.read_statistics(folder):
        found["norm_stats"] = statistics
    return found | _parallel_settings({**flat, **found}, folder)


def _parallel_settings(flat: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings implied by the files of an OpenVLA-OFT folder; empty for other folders."""
    parts = oft.find_parts(folder) if folder.is_dir() else {}
    if not parts:
        return {}
    data_set = flat.get("unnorm_key")
    data_sets = [data_set] if data_set else list(flat.get("norm_stats") or {})
    chunk = oft.find_number(oft.CHUNKS, data_sets)
    found: dict[str, Any] = {"parallel_decoding": True, "is_causal": False}
    if "num_actions_chunk" not in flat:
        if chunk is None:
            raise UserError(
                "the policy's folder is OpenVLA-OFT's, and the name of its data set does not determine the actions of "
                "a chunk. Set num_actions_chunk in its config.json."
            )
        found["num_actions_chunk"] = chunk
    if oft.HEAD in parts:
        shapes = oft.part_shapes(parts[oft.HEAD])
        found |= {"action_head": GAUSSIAN, "head_width": shapes["model.fc1.bias"][0]}
    if oft.PROPRIO in parts:
        found["state_size"] = oft.part_shapes(parts[oft.PROPRIO])["fc1.weight"][1]
        found["num_images"] = flat.get("num_images", oft.find_number(oft.NUM_IMAGES, data_sets) or 2)
    return found
