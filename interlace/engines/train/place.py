"""Place of a rank: the device it computes on, and the ranks it meets. Imports no torch before it is asked to."""

from typing import TYPE_CHECKING

from interlace.engines.train.config import TrainedConfig
from interlace.runtime.worker import WorkerContext

if TYPE_CHECKING:
    from interlace.engines.train.ranks import Ranks


def torch_device(context: WorkerContext) -> str:
    """Returns the device a rank computes on, as torch names it."""
    return torch_name(context.devices[0]) if context.devices else "cpu"


def torch_name(device: str) -> str:
    """Returns a device's name in torch: all CPU cores are one there."""
    return "cpu" if device.startswith("cpu") else device


def join_ranks(context: WorkerContext, trained: TrainedConfig) -> "Ranks":
    """Joins a trained worker's group, met by all of its ranks at once."""
    from interlace.engines.train.ranks import Ranks

    if context.rendezvous is None:
        return Ranks()
    place, device = context.rendezvous, torch_device(context)
    shape = trained.mesh_shape(context.num_ranks, where=context.group)
    return Ranks.join(place.url, place.secret, rank=context.rank, shape=shape, device=device)
