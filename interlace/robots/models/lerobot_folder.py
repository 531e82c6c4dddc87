"""Folders of LeRobot's flow-matching policies (SmolVLA, pi0, pi0.5): settings, statistics, prompt and pictures.

A folder contains `config.json`, `model.safetensors`, and `policy_preprocessor.json` with a reference to the file of the
normalizer's statistics. Imports no torch.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, PositiveInt

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import BoolArray, FloatArray
from interlace.models.config import FlowConfig
from interlace.models.flow import FlowSchedule
from interlace.models.inputs import PictureSteps

RELATIVE = "relative_actions_processor"
"""Step of the pipeline that makes actions relative to the state."""
CONFIG, WEIGHTS, PREPROCESSOR = "config.json", "model.safetensors", "policy_preprocessor.json"
STATE, ACTION, PICTURES = "observation.state", "action", "observation.images."
NUM_BINS = 256
"""Bins of a state's number in pi0.5's prompt."""
NORM_ENTRIES = {STATE: "STATE", ACTION: "ACTION"}
"""Array -> its entry in the normalizer's modes."""
ENDS = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99")}
"""Mode -> names of its two statistics."""
EPSILON = 1e-8
Kind = Literal["smolvla", "pi0", "pi05"]
KINDS: tuple[Kind, ...] = ("smolvla", "pi0", "pi05")
UNSUPPORTED = {
    "adapt_to_pi_aloha": "converts the joints of ALOHA to the space of pi's data",
    "add_image_special_tokens": "reads special tokens around pictures",
    "use_visual_memory": "reads earlier pictures",
    "use_proprioceptive_memory": "reads earlier states",
}
"""Setting of config.json -> effect that is not supported."""
DEFAULTS: Mapping[Kind, Mapping[str, Any]] = {
    "smolvla": {"side": 512, "tokens": 48},
    "pi0": {"side": 224, "tokens": 48},
    "pi05": {"side": 224, "tokens": 200},
}


Square = tuple[PositiveInt, PositiveInt]


class _Feature(Config):
    """Array that a policy reads or gives."""

    model_config = ConfigDict(extra="allow")

    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class _Settings(Config):
    """Settings of config.json that are read here. An absent key, or an accepted null, means LeRobot's default."""

    model_config = ConfigDict(extra="allow")

    chunk_size: PositiveInt = 50
    n_action_steps: PositiveInt | None = None
    num_steps: PositiveInt | None = None
    num_inference_steps: PositiveInt | None = None
    max_state_dim: PositiveInt = 32
    max_action_dim: PositiveInt = 32
    tokenizer_max_length: PositiveInt | None = None
    resize_imgs_with_padding: Square | None = None
    image_resolution: Square | None = None
    input_features: dict[str, _Feature] = Field(default_factory=dict)
    output_features: dict[str, _Feature] = Field(default_factory=dict)
    empty_cameras: int = 0
    use_relative_actions: bool = False


class _Step(Config):
    """Step of the pipeline before the policy."""

    model_config = ConfigDict(extra="allow")

    registry_name: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    state_file: str | None = None


class _Pipeline(Config):
    model_config = ConfigDict(extra="allow")

    steps: tuple[_Step, ...] = ()

    def find(self, name: str) -> _Step | None:
        return next((step for step in self.steps if step.registry_name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Normalizer:
    """Normalisation of one array by its statistics."""

    mode: str
    """LeRobot's name of the mode: MEAN_STD, MIN_MAX, QUANTILES (0.01 and 0.99) or IDENTITY."""
    first: FloatArray
    """Mean, or lower end of the range."""
    second: FloatArray
    """Standard deviation, or upper end of the range."""

    def fits(self, size: int) -> bool:
        """Returns True if the statistics are of arrays of `size` numbers."""
        return self.mode == "IDENTITY" or self.first.shape == self.second.shape == (size,)

    def normalize(self, numbers: FloatArray) -> FloatArray:
        """Converts a data set's numbers to the policy's."""
        if self.mode == "IDENTITY":
            return numbers
        if self.mode == "MEAN_STD":
            return ((numbers - self.first) / (self.second + EPSILON)).astype(np.float32)
        return (2 * (numbers - self.first) / self._range() - 1).astype(np.float32)

    def restore(self, numbers: FloatArray) -> FloatArray:
        """Converts a policy's numbers to the data set's."""
        if self.mode == "IDENTITY":
            return numbers
        if self.mode == "MEAN_STD":
            return (numbers * (self.second + EPSILON) + self.first).astype(np.float32)
        return ((numbers + 1) / 2 * self._range() + self.first).astype(np.float32)

    def _range(self) -> FloatArray:
        width = self.second - self.first
        return np.where(width == 0, np.float32(EPSILON), width)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LerobotFolder:
    """Contents of a folder, except the weights."""

    path: Path
    kind: Kind
    settings: Mapping[str, Any]
    """Contents of config.json."""
    cameras: tuple[str, ...]
    """Names of the pictures without `observation.images.`, in the policy's order."""
    state: Normalizer
    action: Normalizer
    schedule: FlowSchedule
    """Chain of a chunk: steps, direction and padding."""
    executed: int
    """Number of actions of a chunk that are executed before the policy runs again."""
    pictures: PictureSteps
    num_text_tokens: int
    """Longest prompt, in tokens."""
    relative: BoolArray | None = None
    """[A] True on the numbers of an action that are offsets from the state before the chunk, as in openpi. None if no
    number is."""

    def prompt(self, task: str, state: FloatArray) -> str:
        """Returns the text of a prompt. state: normalised, [F]; only pi0.5 includes it in the text."""
        if self.kind == "smolvla":
            return task if task.endswith("\n") else f"{task}\n"
        cleaned = task.strip().replace("_", " ").replace("\n", " ")
        if self.kind == "pi0":
            return f"{cleaned}\n"
        bins = np.digitize(self.pad_state(state), np.linspace(-1, 1, NUM_BINS + 1)[:-1]) - 1
        return f"Task: {cleaned}, State: {' '.join(map(str, bins))};\nAction: "

    def pad_state(self, state: FloatArray) -> FloatArray:
        """Returns a normalised state, padded with zeros to the policy's size."""
        size = int(self.settings.get("max_state_dim", 32))
        return np.pad(state, (0, max(0, size - len(state)))).astype(np.float32)

    def restore_actions(self, numbers: FloatArray, state: FloatArray) -> FloatArray:
        """Converts a chunk of the policy [K, P] to actions [K, A]. state: before the chunk, not normalised, [F]."""
        return self.action.restore(numbers[:, : self.schedule.size]) + self._find_offsets(state)

    def normalize_actions(self, actions: FloatArray, state: FloatArray) -> FloatArray:
        """Converts actions [n, A] to the policy's numbers; the inverse of restore_actions()."""
        return self.action.normalize(actions - self._find_offsets(state))

    def _find_offsets(self, state: FloatArray) -> FloatArray:
        """Returns the state of the relative numbers of an action, [A], and 0 of the others."""
        if self.relative is None:
            return np.zeros(self.schedule.size, np.float32)
        return np.where(self.relative, np.asarray(state, np.float32)[: self.schedule.size], np.float32(0))

    def picture(self, raw: NDArray[np.uint8]) -> FloatArray:
        """Converts a picture to [3, side, side] with numbers from -1 to 1."""
        prepared = self.pictures.prepare(raw)
        return np.ascontiguousarray(prepared.transpose(2, 0, 1), np.float32) / 127.5 - 1


def read_folder(path: Path, sampler: FlowConfig | None = None) -> LerobotFolder:
    """Reads a folder. sampler: noise of the steps for RL; the folder determines steps, direction and padding.

    Raises UserError if it is not such a folder, lacks the statistics of state or actions, or is not supported.
    """
    where, settings = f"policy folder {str(path)!r}", _read_json(path / CONFIG)
    kind = settings.get("type")
    if kind not in KINDS:
        raise UserError(
            f"{where}: its config.json names type {kind!r}. Known flow-matching policies: {', '.join(KINDS)}."
        )
    defaults = DEFAULTS[kind]
    found = _Settings.parse(settings, where=f"{where}: {CONFIG}")
    steps = found.num_steps or found.num_inference_steps or 10
    side, other = found.resize_imgs_with_padding or found.image_resolution or (defaults["side"], defaults["side"])
    if side != other:
        raise UserError(
            f"{where} reads pictures of {side} x {other} pixels, and only squares are supported. "
            "Take a policy of square pictures."
        )
    action = found.output_features.get(ACTION)
    if action is None:
        raise UserError(f"the policy's config.json has no output_features.{ACTION}, whose shape is needed.")
    size = action.shape[0]
    if size > found.max_action_dim:
        raise UserError(
            f"{where}: actions have {size} numbers, and max_action_dim={found.max_action_dim} in its config.json. "
            "Copy the policy again."
        )
    padding = {"steps": steps, "noise_at": 1, "padded_size": found.max_action_dim}
    flow = (sampler or FlowConfig()).model_copy(update=padding)
    if unsupported := [name for name in UNSUPPORTED if settings.get(name)]:
        raise UserError(
            f"{where}: {unsupported[0]}=true in its config.json, so the policy "
            f"{UNSUPPORTED[unsupported[0]]}, which is not supported. Take a policy that was trained without it."
        )
    pipeline = _Pipeline.parse(_read_json(path / PREPROCESSOR), where=f"{where}: {PREPROCESSOR}")
    normalizers = _read_normalizers(path, pipeline)
    for name, feature in ((STATE, found.input_features.get(STATE)), (ACTION, action)):
        if feature is not None and not normalizers[name].fits(feature.shape[0]):
            raise UserError(
                f"{where}: the normalisation statistics of {name} have {len(normalizers[name].first)} numbers, and "
                f"its config.json {feature.shape[0]}. Copy the statistics of the data set that it was trained on."
            )
    return LerobotFolder(
        path=path,
        kind=kind,
        settings=settings,
        cameras=_list_cameras(found),
        state=normalizers[STATE],
        action=normalizers[ACTION],
        schedule=FlowSchedule(config=flow, chunk=found.chunk_size, size=size),
        executed=found.n_action_steps or found.chunk_size,
        pictures=PictureSteps(side=side, resize="pad_left_top" if kind == "smolvla" else "pad_center"),
        num_text_tokens=found.tokenizer_max_length or defaults["tokens"],
        relative=_read_relative(path, found, pipeline, size),
    )


def _list_cameras(settings: _Settings) -> tuple[str, ...]:
    """Returns the names of the pictures. Empty cameras of the training are left out: no token attends to them."""
    names = [name.removeprefix(PICTURES) for name in settings.input_features if name.startswith(PICTURES)]
    empty = {f"empty_camera_{number}" for number in range(settings.empty_cameras)}
    return tuple(name for name in names if name not in empty)


def _read_relative(path: Path, settings: _Settings, pipeline: _Pipeline, size: int) -> BoolArray | None:
    """Returns the numbers of an action that are offsets from the state; None if no number is.

    A name of the excluded joints excludes all numbers whose names contain it.
    """
    step = pipeline.find(RELATIVE)
    if step is None and settings.use_relative_actions:
        raise UserError(
            f"policy folder {str(path)!r}: use_relative_actions=true in its config.json, and {PREPROCESSOR} has no "
            f"{RELATIVE} with the numbers that are relative. Save the policy with LeRobot again."
        )
    found = step.config if step else {}
    if not found.get("enabled"):
        return None
    excluded = [str(name).lower() for name in found.get("exclude_joints") or () if name]
    names = [str(name).lower() for name in found.get("action_names") or ()][:size]
    is_excluded = [any(token in name for token in excluded) for name in names]
    return ~np.array(is_excluded + [False] * (size - len(names)), np.bool_)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"policy folder {str(file.parent)!r} has no readable {file.name}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"policy folder {str(file.parent)!r}: {file.name} is not a mapping.")
    return found


@contextmanager
def refuse_damaged(file: Path) -> Iterator[None]:
    """Raises UserError if the block reads a damaged safetensors file."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}). Copy the policy again.") from None


def _read_normalizers(path: Path, pipeline: _Pipeline) -> dict[str, Normalizer]:
    """Reads the normalisation of state and action. Raises UserError if statistics are missing."""
    from safetensors.numpy import load_file

    step = pipeline.find("normalizer_processor")
    if step is None or not isinstance(step.config.get("norm_map"), dict):
        raise UserError(f"policy folder {str(path)!r}: {PREPROCESSOR} has no normalizer_processor with a norm_map.")
    modes = {name: step.config["norm_map"].get(entry, "IDENTITY") for name, entry in NORM_ENTRIES.items()}
    file = path / (step.state_file or "")
    has_statistics = file.is_file() and any(mode in ENDS for mode in modes.values())
    with refuse_damaged(file):
        stored = load_file(file) if has_statistics else {}
    return {name: _normalizer(file, name, mode, stored) for name, mode in modes.items()}


def _normalizer(file: Path, name: str, mode: str, stored: Mapping[str, FloatArray]) -> Normalizer:
    """Returns the normalisation of an array. file: of the statistics. stored: its content."""
    if mode == "IDENTITY":
        return Normalizer(mode=mode, first=np.zeros(0, np.float32), second=np.zeros(0, np.float32))
    path = str(file.parent)
    if mode not in ENDS:
        raise UserError(f"policy folder {path!r} normalises {name} by {mode}; known: {', '.join(ENDS)}, IDENTITY.")
    first, second = (stored.get(f"{name}.{end}") for end in ENDS[mode])
    if first is None or second is None:
        raise UserError(
            f"policy folder {path!r} has no normalisation statistics of {name} ({' and '.join(ENDS[mode])} in "
            f"{file.name}): its actions would have no scale. Copy the file of the data set that the policy was trained "
            "on, or compute the statistics of your data set."
        )
    return Normalizer(mode=mode, first=first.astype(np.float32), second=second.astype(np.float32))
