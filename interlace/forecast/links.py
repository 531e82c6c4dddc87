"""Links between devices, nodes and sites: the time that weights and samples take to cross them."""

from collections.abc import Sequence

from pydantic import Field

from interlace.core.config import Config


class Link(Config):
    """One kind of link."""

    bytes_per_s: float = Field(gt=0)
    """Bytes/s in one direction: of one device, or of a whole link between sites."""
    latency_s: float = Field(default=0.0, ge=0)
    """Seconds until the first byte arrives."""

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds to move `num_bytes` over the link."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Links(Config):
    """Links of a cluster. Devices are numbered node after node; a node contains devices of one kind."""

    devices_per_node: int = Field(default=8, ge=1)
    in_node: Link
    between_nodes: Link
    between_sites: Link | None = None
    """Link between sites. If set, each kind of device is at a separate site, and all traffic between kinds uses this
    link."""
    sample_token_bytes: int = Field(default=16, ge=0)
    """Bytes of a sample for each of its tokens: id, log-prob, mask, advantage."""

    def weights_s(self, num_bytes: float, sources: Sequence[str], targets: Sequence[str]) -> float:
        """Returns the seconds until one engine has a trainer's weights. Arguments are device names such as `h20:3`.

        Sources and targets that share a device take no time. Weights cross a link between sites once for all engines,
        and the other site distributes them.
        """
        if set(sources) & set(targets):
            return 0.0
        mine = num_bytes / len(targets)
        if self._is_apart(sources, targets) and self.between_sites:
            return self.between_sites.seconds(num_bytes) + self.between_nodes.seconds(mine)
        return self._find_nearest(sources, targets).seconds(mine)

    def samples_s(self, sources: Sequence[str], targets: Sequence[str]) -> tuple[float, float]:
        """Returns (latency, seconds a token) to move samples from engines to the workers that process them.

        Sources and targets that share a device take no time. Every device of the receiver takes in its own part, except
        over a link between sites.
        """
        if set(sources) & set(targets):
            return 0.0, 0.0
        if self._is_apart(sources, targets) and self.between_sites:
            return self.between_sites.latency_s, self.sample_token_bytes / self.between_sites.bytes_per_s
        link = self._find_nearest(sources, targets)
        return link.latency_s, self.sample_token_bytes / link.bytes_per_s / len(targets)

    def enlarge_samples(self, factor: int) -> "Links":
        """Returns the links for 1 / `factor` of the samples or tokens, each of which has as many bytes as `factor`."""
        return self.model_copy(update={"sample_token_bytes": self.sample_token_bytes * factor})

    def _is_apart(self, sources: Sequence[str], targets: Sequence[str]) -> bool:
        return not {_pool_of_device(name) for name in sources} & {_pool_of_device(name) for name in targets}

    def _find_nearest(self, sources: Sequence[str], targets: Sequence[str]) -> Link:
        shared = {self._parse_node(name) for name in sources} & {self._parse_node(name) for name in targets}
        return self.in_node if shared else self.between_nodes

    def _parse_node(self, name: str) -> tuple[str, int]:
        pool, _, index = name.partition(":")
        return pool, int(index) // self.devices_per_node


def _pool_of_device(name: str) -> str:
    return name.partition(":")[0]
