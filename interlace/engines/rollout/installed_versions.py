"""Versions of the weights in an engine: the newest, and older adapters for the sequences that began with them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from interlace.engines.rollout.live_weights import LiveWeights
from interlace.engines.rollout.runner import Runner


class InstalledVersions:
    """Installs the weights that a forward pass needs, and gives the runner their addresses."""

    def __init__(self, weights: LiveWeights, runner: Runner) -> None:
        self._weights, self._runner = weights, runner
        self.newest = 0
        """Version of the weights that new sequences are sampled with."""
        self._bindings: dict[int, object] = {}
        """Runner bindings (weight addresses) of each older version in use."""

    def rebind(self) -> None:
        """Finds the addresses of the weights again, after they or the KV cache have moved."""
        self._runner.rebind()
        self._bindings = {}

    @contextmanager
    def install(self, version: int | None) -> Iterator[int]:
        """Installs the weights of an older version for the sequences that began with it. None: the newest version."""
        if version is None:
            yield self.newest
            return
        newest = self._runner.binding
        self._weights.serve(version)
        if version in self._bindings:
            self._runner.binding = self._bindings[version]
        else:
            self._runner.rebind()
            self._bindings[version] = self._runner.binding
        try:
            yield version
        finally:
            self._weights.serve(None)
            self._runner.binding = newest

    def drop_unused(self, used: Iterable[int | None]) -> None:
        """Drops the older versions that no sequence uses. used: versions in use."""
        for version in self._weights.versions - {*used}:
            self._weights.let_go(version)
            self._bindings.pop(version, None)
