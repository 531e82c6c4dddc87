"""Links between devices, nodes and sites: what moving weights and samples over them takes."""

from collections.abc import Sequence

from pydantic import Field

from interlace.core.config import Config


class Link(Config):
    """One kind of link."""

    bytes_per_s: float = Field(gt=0)
    """In one direction, of one device; of a link between sites, of all of them together."""
    latency_s: float = Field(default=0.0, ge=0)
    """Seconds until the first byte arrives."""

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds that moving these bytes takes."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Links(Config):
    """Links of a cluster. Devices are numbered node after node; each kind of device is in nodes of its own."""

    devices_per_node: int = Field(default=8, ge=1)
    in_node: Link
    between_nodes: Link
    between_sites: Link | None = None
    """Given, each kind of device is at a site of its own, and all that passes between two kinds goes over this link."""
    sample_token_bytes: int = Field(default=16, ge=0)
    """Bytes of a sample for each of its tokens: id, log-prob, mask, advantage."""

    def weights_s(self, num_bytes: float, sources: Sequence[str], targets: Sequence[str]) -> float:
        """Returns the seconds until an engine has weights of a trainer; both are named by their devices (`h20:3`).

        Nothing where they share a device. To another site they pass once for all engines, and are passed on there.
        """
        if set(sources) & set(targets):
            return 0.0
        mine = num_bytes / len(targets)
        if self._is_apart(sources, targets) and self.between_sites:
            return self.between_sites.seconds(num_bytes) + self.between_nodes.seconds(mine)
        return self._nearest(sources, targets).seconds(mine)

    def samples_s(self, sources: Sequence[str], targets: Sequence[str]) -> tuple[float, float]:
        """Returns (latency, seconds a token) of bringing samples of engines to workers that compute on them.

        Nothing where they share devices. Every device of the receiver takes in its own part, but over one link
        between sites.
        """
        if set(sources) & set(targets):
            return 0.0, 0.0
        if self._is_apart(sources, targets) and self.between_sites:
            return self.between_sites.latency_s, self.sample_token_bytes / self.between_sites.bytes_per_s
        link = self._nearest(sources, targets)
        return link.latency_s, self.sample_token_bytes / link.bytes_per_s / len(targets)

    def _is_apart(self, sources: Sequence[str], targets: Sequence[str]) -> bool:
        return not {_pool(name) for name in sources} & {_pool(name) for name in targets}

    def _nearest(self, sources: Sequence[str], targets: Sequence[str]) -> Link:
        shared = {self._node(name) for name in sources} & {self._node(name) for name in targets}
        return self.in_node if shared else self.between_nodes

    def _node(self, name: str) -> tuple[str, int]:
        pool, _, index = name.partition(":")
        return pool, int(index) // self.devices_per_node


def _pool(name: str) -> str:
    return name.partition(":")[0]
