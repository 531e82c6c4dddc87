"""Swapping the weights of a model that serves: all or none."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from interlace.core.errors import UserError, nearest


class LiveWeights:
    """The model's parameters and persistent buffers by their Hugging Face names, tied names joined."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        canonical: dict[int, str] = {}
        self._same_as = {name: canonical.setdefault(id(tensor), name) for name, tensor in self._tensors.items()}
        """Name -> the first name of the same tensor: an update needs one of the names that are tied."""
        parameters = {name for name, _ in model.named_parameters()}
        self._required = [name for name in dict.fromkeys(self._same_as.values()) if name in parameters]
        """Buffers may be left out: training does not change them."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(self._tensors[name].nbytes for name in set(self._same_as.values()))

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies all tensors in place. UserError, and no change, for a missing or unknown name or another shape."""
        self._validate(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._tensors[name].detach().copy_(tensor.detach())

    def _validate(self, tensors: Mapping[str, Tensor]) -> None:
        kept = "The update is refused as a whole; the old weights keep serving."
        for name, tensor in tensors.items():
            if name not in self._tensors:
                raise UserError(f"weight update: unknown name {name!r}.{nearest(name, self._tensors)} {kept}")
            if tensor.shape != self._tensors[name].shape:
                raise UserError(
                    f"weight update: {name} has shape {tuple(tensor.shape)}, the model's is"
                    f" {tuple(self._tensors[name].shape)}. {kept}"
                )
        given: dict[str, str] = {}
        for name in tensors:
            first = given.setdefault(self._same_as[name], name)
            if first != name and not torch.equal(tensors[first], tensors[name]):
                raise UserError(
                    f"weight update: {first} and {name} are one tensor in the engine's model and differ in the update:"
                    f" one model ties them and the other does not. {kept} Load both with the same tie_word_embeddings."
                )
        missing = [name for name in self._required if name not in given]
        if missing:
            some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise UserError(f"weight update: missing {some}. {kept} Send every parameter of the model.")
