"""Device of a rank, and its process group. Imports torch only when a function needs it."""

from typing import TYPE_CHECKING

from interlace.engines.train.config import TrainedConfig
from interlace.runtime.worker import WorkerContext

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from interlace.engines.train.ranks import Ranks


def torch_device(context: WorkerContext) -> str:
    """Returns torch's name of the device a rank computes on."""
    return torch_name(context.devices[0]) if context.devices else "cpu"


def torch_name(device: str) -> str:
    """Returns torch's name of a device: torch has one device for all CPU cores."""
    return "cpu" if device.startswith("cpu") else device


LARGE_WEIGHT = 1 << 17
"""Elements of a weight matrix. Products with a smaller matrix are too short to split between threads."""


def useful_threads(model: "PreTrainedModel", num_threads: int) -> int:
    """Returns the number of threads for a rank's CPU operations on a model: 1 for a small model, else `num_threads`.

    Threads synchronize after each product. On a busy machine the operating system often runs only one of them, and it
    waits a time slice for the others: with products of microseconds, a step takes ten times as long as on one
    thread. The rule depends on the model alone, so the bits of a result do not depend on the load at the start.
    """
    largest = max((weight.numel() for weight in _inner_weights(model)), default=0)
    return num_threads if largest >= LARGE_WEIGHT else 1


def _inner_weights(model: "PreTrainedModel") -> "Iterator[Tensor]":
    """Yields weight matrices except the vocabulary's, of which a token reads one row."""
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    skipped = {id(weight) for module in outer if module is not None for weight in module.parameters()}
    for parameter in model.parameters():
        if parameter.ndim >= 2 and id(parameter) not in skipped:
            yield parameter


def join_ranks(context: WorkerContext, trained: TrainedConfig) -> "Ranks":
    """Joins the process group of a trained worker; all of its ranks call this at the same time."""
    from interlace.engines.train.ranks import Ranks

    if context.rendezvous is None:
        return Ranks()
    place, device = context.rendezvous, torch_device(context)
    shape = trained.mesh_shape(context.num_ranks, where=context.group)
    return Ranks.join(place.url, place.secret, rank=context.rank, shape=shape, device=device)
