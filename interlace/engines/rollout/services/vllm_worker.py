"""Code within vLLM's worker processes that loads a version of the weights from a folder (`--worker-extension-cls`)."""

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
        """Replaces all weights by the weights in a Hugging Face folder.

        A reload keeps the packed copy of a tied head that has no tensor, so a tied embedding is also loaded as the
        head.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:  # A reload without tensors would leave the model without data.
            raise FileNotFoundError(f"{folder} holds no .safetensors file, or this machine does not see the folder")
        config = self.model_runner.model_config.hf_config
        is_tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
        self.model_runner.reload_weights(weights_iterator=_read_tensors(files, is_tied=is_tied))

    def count_bytes(self) -> tuple[int, int]:
        """Returns the bytes of the weights, if vLLM measured them, and the bytes of the KV cache."""
        runner = self.model_runner
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in runner.kv_caches}
        return int(getattr(runner, "model_memory_usage", 0)), sum(storages.values())


def _read_tensors(files: Sequence[Path], *, is_tied: bool) -> "Iterator[tuple[str, Tensor]]":
    embedding, has_head = None, False
    for name, tensor in _read_files(files):
        has_head = has_head or name == HEAD
        embedding = tensor if name.endswith(EMBEDDINGS) else embedding
        yield name, tensor
    if is_tied and not has_head and embedding is not None:
        yield HEAD, embedding


def _read_files(files: Sequence[Path]) -> "Iterator[tuple[str, Tensor]]":
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as held:
            yield from ((name, held.get_tensor(name)) for name in held.keys())  # noqa: SIM118 - not a mapping
