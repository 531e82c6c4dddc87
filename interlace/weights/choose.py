"""Choice of the transport for a run's weights, by the placement of trainer and engines. Imports no torch."""

from collections.abc import Sequence

from interlace.weights.config import BY_PLACE, WeightsConfig
from interlace.weights.ref import Place


def choose_transport(config: WeightsConfig, writers: Sequence[Place], readers: Sequence[Place]) -> tuple[str, str]:
    """Returns the transport's name and the reason for it. writers: trainer ranks' places; readers: engines' places."""
    if config.transport != BY_PLACE:
        return config.transport, "set by the recipe"
    every = [*writers, *readers]
    memories, processes = {place.memory for place in every}, {(place.memory, place.process) for place in every}
    moves_bytes = config.codec == "delta"
    if len(processes) == 1 and not moves_bytes:
        return "alias", "trainer and engines are one process"
    if len(memories) == 1 and "" not in memories and not moves_bytes:
        return "shared_memory", f"{len(processes)} processes share this machine's memory"
    if len(processes) == 1:
        return "object_store", "a delta is passed on within the process"
    where = "one machine" if len(memories) == 1 else f"{len(memories)} machines"
    return "object_store", f"{len(processes)} processes on {where}"
