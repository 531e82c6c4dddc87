"""Weights in the safetensors files of a folder, read block by block: a rank reads only its part of a model.

Names and shapes in a folder often differ from the model's: transformers stacks experts and fuses projections as it
loads. The mapping is found by tracing the model's loader once, without content (weights/recording.py).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import InterlaceError, UserError
from interlace.models.config import ModelConfig
from interlace.models.loading import LoadedModel, Origin, check_undamaged, empty_model, find_origin, load_model
from interlace.models.tiny import TINY
from interlace.models.transformers_lock import TRANSFORMERS_LOCK
from interlace.weights.file_layout import SAVED_TYPES
from interlace.weights.plan import Box, Shard
from interlace.weights.recording import Landing, find_unfilled, join_landed, record_load, select_landings
from interlace.weights.ref import FACTORS
from interlace.weights.shards import ShapedTensors, local_part, shards_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_TYPES = {saved: name for name, saved in SAVED_TYPES.items()}


class SavedWeights:
    """Tensors in the safetensors files of a folder."""

    def __init__(self, folder: str | Path) -> None:
        """Reads the files' headers. Raises UserError if the folder has none."""
        from safetensors import safe_open

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise UserError(
                f"{folder} holds no .safetensors file: there are no weights to load. Give a folder that save_pretrained"
                " wrote."
            )
        self._files: dict[str, Path] = {}
        self.shards: dict[str, Shard] = {}
        """Description of each tensor, whole, by its name."""
        for path in files:
            with safe_open(path, framework="pt") as held:
                for name in held.keys():  # noqa: SIM118 - the file is not a mapping
                    piece = held.get_slice(name)
                    shape = tuple(piece.get_shape())
                    self._files[name] = path
                    self.shards[name] = Shard(name, shape, _TYPES[piece.get_dtype()], Box.of(shape))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shard.shape for name, shard in self.shards.items()}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Reads one block of a tensor into host memory. box: the block. If None, the whole tensor."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as held:
            if box is None or box == self.shards[name].box:
                tensor: Tensor = held.get_tensor(name)
            else:
                tensor = held.get_slice(name)[box.slices]
        return tensor

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.shards:
            yield name, self.read(name)

    def map_files(self) -> dict[str, Tensor]:
        """Returns all tensors, in the memory of files that are mapped once."""
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        for path in dict.fromkeys(self._files.values()):
            with safe_open(path, framework="pt") as held:
                found |= {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118 - it is not a mapping
        return found


class LandedWeights(ShapedTensors):
    """Blocks of a model's tensors, each assembled from a folder's files when it is read."""

    def __init__(self, saved: SavedWeights, landings: Sequence[Landing], needs: Sequence[Shard]) -> None:
        """needs: the blocks, in the model's names. Raises UserError if the folder does not fill one of them."""
        super().__init__({shard.name: tuple(shard.box.size) for shard in needs})
        self._saved, self._needs = saved, {shard.name: shard for shard in needs}
        self._landings = select_landings(landings, needs)
        if lacking := find_unfilled(self._landings, needs):
            raise UserError(
                f"the model's folder lacks {len(lacking)} weights ({', '.join(lacking[:3])} ...), which would be "
                "random: is this the whole model, of that architecture?"
            )

    def __getitem__(self, name: str) -> Tensor:
        import torch

        shard, pieces = self._needs[name], self._landings[name]
        blocks = (self._saved.read(piece.source, piece.source_box) for piece in pieces)
        return join_landed(shard.box, pieces, blocks, getattr(torch, shard.dtype))


class PartReader:
    """Reader of a rank's part of a model in a folder. No rank ever holds the whole model."""

    def __init__(self, saved: SavedWeights, landings: Sequence[Landing]) -> None:
        self._saved, self._landings = saved, landings

    def fill(self, model: nn.Module) -> None:
        """Reads this rank's part of each tensor. The model must be sharded, with its memory allocated."""
        whole: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        firsts = {id(tensor): name for name, tensor in reversed(whole.items())}  # first name of a tied tensor
        needs = shards_of({name: whole[name] for name in reversed(firsts.values())})
        for name, block in LandedWeights(self._saved, self._landings, needs).items():
            local_part(whole[name]).copy_(block)


def load_without_content(config: ModelConfig, *, is_checked: bool) -> tuple[LoadedModel, PartReader] | None:
    """Makes a folder's model on the meta device, and the reader of a rank's part of it.

    Returns None if the model must be loaded whole: it is built in code, comes from a hub, is damaged, or its loader
    does more than cut and join. is_checked: the whole folder is checked against its manifest, which one rank does for
    all ranks.
    """
    if config.path.startswith(TINY) or not find_origin(config).is_local:
        return None
    readers: list[PartReader] = []

    def read(origin: Origin, config: ModelConfig, found: PretrainedConfig) -> PreTrainedModel:
        import torch
        from transformers import GenerationConfig

        if is_checked:
            check_undamaged(origin, config, what="model")
        saved, dtype = SavedWeights(origin.location), getattr(torch, config.dtype)
        model, landings = trace_load(type(empty_model(config)), found, saved, dtype)
        if (Path(origin.location) / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(origin.location)
        # Also reports missing weights of the folder, before any rank waits for another.
        LandedWeights(saved, landings, shards_of(model.state_dict()))
        readers.append(PartReader(saved, landings))
        return model

    try:
        loaded = load_model(config, read)
    except (InterlaceError, RuntimeError, ValueError):  # loading the model whole succeeds or reports the error
        return None
    return loaded, readers[0]


def trace_load(
    kind: type[PreTrainedModel], config: PretrainedConfig, saved: SavedWeights, dtype: torch.dtype
) -> tuple[PreTrainedModel, tuple[Landing, ...]]:
    """Runs transformers' loader on tensors without content. Returns the model, on the meta device except for tensors
    that the folder lacks, and the landings of the saved tensors in it."""
    made: list[PreTrainedModel] = []

    def load(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        made.append(kind.from_pretrained(None, config=config, state_dict=dict(given), dtype=dtype))
        return made[0].state_dict()

    with TRANSFORMERS_LOCK, _on_this_thread():
        landings = record_load(load, saved.shards)
    return made[0], landings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedForm:
    """Layout of the folder that transformers would write for a model."""

    landings: Sequence[Landing]
    """Block of a saved tensor for each block of the model."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each saved tensor."""
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None

    def write_beside(self, folder: Path, dtype: str) -> None:
        """Writes all files except the weights. dtype: dtype of the weights, for the configuration."""
        self.config.dtype = dtype
        self.config.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def trace_saved_form(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> SavedForm:
    """Traces transformers' saver on a model's tensors without content.

    If the saver leaves out weights, or does more than cut, join and rename, the result has the model's names, which
    some programs do not read.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # the model was loaded from GGUF, and its weights are not quantized
        del config.quantization_config
    with torch.device("meta"):
        empty = type(model)(config)
    config.architectures = [type(empty).__name__]  # a sharded model's class has another name
    state = model.state_dict()
    if any(f".{FACTORS[0]}." in name for name in state):  # a layer with an adapter has its own name once it is merged
        state = empty.state_dict()
    own = {shard.name: shard._replace(box=Box.of(shard.shape)) for shard in shards_of(state)}
    try:
        back = _turn_back(record_load(lambda given: revert_weight_conversion(empty, dict(given)), own))
        whole = not find_unfilled(select_landings(back, [*own.values()]), [*own.values()])
    except InterlaceError:
        whole = False
    if not whole:
        back = _turn_back(record_load(dict, own))
    return SavedForm(landings=back, shapes=_measure_extents(back), config=config, tokenizer=tokenizer)


def _turn_back(landings: Sequence[Landing]) -> tuple[Landing, ...]:
    """Exchanges source and target. landings: from the model's tensors to saved tensors. Returns the opposite."""
    return tuple(Landing(target, target_box, source, source_box) for source, source_box, target, target_box in landings)


def find_other_form(model: PreTrainedModel) -> SavedForm | None:
    """Returns the layout that transformers would save a model in, if it differs from the model's names and shapes.

    Returns None if both are equal. The model may be on the meta device.
    """
    form = trace_saved_form(model)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return form if any(own.get(name) != shape for name, shape in form.shapes.items()) else None


class SavedFormWeights(ShapedTensors):
    """A model's weights by the names and shapes of its saved form, each cut out or assembled when it is read."""

    def __init__(self, weights: Mapping[str, Tensor], form: SavedForm) -> None:
        """weights: by the model's names, tied ones once."""
        self._weights = weights
        self._landings: dict[str, list[Landing]] = {}
        for name, box, target, target_box in form.landings:
            if target in weights:
                self._landings.setdefault(name, []).append(Landing(target, target_box, name, box))
        super().__init__({name: form.shapes[name] for name in self._landings})
        self._held: tuple[str, Tensor] | None = None
        """The model's tensor that was read last: the experts of a layer are parts of one."""

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._landings[name]
        blocks = [self._read(piece.source)[piece.source_box.slices] for piece in pieces]
        return join_landed(Box.of(self.shapes[name]), pieces, blocks, blocks[0].dtype)

    def _read(self, name: str) -> Tensor:
        if self._held is None or self._held[0] != name:
            self._held = name, self._weights[name]
        return self._held[1]


def _measure_extents(landings: Sequence[Landing]) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of each saved tensor, as the extent of its blocks."""
    found: dict[str, tuple[int, ...]] = {}
    for name, box, _, _ in landings:
        ends = tuple(start + size for start, size in zip(box.start, box.size, strict=True))
        found[name] = tuple(map(max, found.get(name, ends), ends))
    return found


@contextmanager
def _on_this_thread() -> Iterator[None]:
    """Makes transformers load without its own threads, whose operations could not be traced."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
