"""Code within vLLM's worker processes that loads versions of the weights (`--worker-extension-cls`)."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""Suffixes of the names of input embeddings."""


class FolderWeights:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any
    """vLLM's model runner, which the worker class sets."""

    def load_folder(self, folder: str) -> None:
        """Replaces all weights by the weights in a Hugging Face folder."""
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:  # A reload without tensors would leave the model without data.
            raise FileNotFoundError(f"{folder} holds no .safetensors file, or this machine does not see the folder")
        self._replace_weights(_read_files(files))

    def load_manifest(self, manifest: str) -> None:
        """Replaces all weights by a version in the trainer's shared memory."""
        from interlace.engines.rollout.services.protocol import read_manifest
        from interlace.weights.reader import WeightReader

        reader = WeightReader()
        try:
            with reader.open(read_manifest(json.loads(manifest))) as weights:
                self._replace_weights((name, weights[name]) for name in weights)
        finally:
            reader.close()  # vLLM has copied the weights, so the trainer may write to the slots again

    def _replace_weights(self, tensors: "Iterator[tuple[str, Tensor]]") -> None:
        """Replaces all weights.

        A reload keeps the packed copy of a tied head that has no tensor, so a tied embedding is also loaded as the
        head.
        """
        config = self.model_runner.model_config.hf_config
        is_tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
        self.model_runner.reload_weights(weights_iterator=_add_tied_head(tensors) if is_tied else tensors)

    def count_bytes(self) -> tuple[int, int]:
        """Returns the bytes of the weights, if vLLM measured them, and the bytes of the KV cache."""
        runner = self.model_runner
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in runner.kv_caches}
        return int(getattr(runner, "model_memory_usage", 0)), sum(storages.values())


def _add_tied_head(tensors: "Iterator[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
    embedding, has_head = None, False
    for name, tensor in tensors:
        has_head = has_head or name == HEAD
        embedding = tensor if name.endswith(EMBEDDINGS) else embedding
        yield name, tensor
    if not has_head and embedding is not None:
        yield HEAD, embedding


def _read_files(files: Sequence[Path]) -> "Iterator[tuple[str, Tensor]]":
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as held:
            yield from ((name, held.get_tensor(name)) for name in held.keys())  # noqa: SIM118 - not a mapping
