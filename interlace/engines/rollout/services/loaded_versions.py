"""Versions of the weights that were loaded into a server, to check the versions that it reports."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from interlace.core.errors import UserError
from interlace.engines.rollout.services.protocol import Delta


class LoadedVersions:
    """Tracks the version that a server should serve, and those that may have sampled tokens of running requests."""

    def __init__(self) -> None:
        self.current: int | None = None
        """Version that the server should serve; None before the first load."""
        self.is_loading = False
        """True while a version is loaded."""
        self._known: set[int] = set()

    def add(self, version: int) -> None:
        """Adds a version that may have sampled tokens."""
        self._known.add(version)

    def clear(self) -> None:
        """Forgets all versions, because the server starts again."""
        self._known.clear()
        self.current = None

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """Surrounds the load of a version. A UserError of the block means that the server refused the version."""
        before = self.current
        self.is_loading = True
        self._known.add(version)
        try:
            yield
        except UserError:
            self._known.discard(version)
            self.current = before
            raise
        finally:
            self.is_loading = False

    def add_version(self, delta: Delta) -> Delta:
        """Adds the current version to a delta whose server does not report versions."""
        if not delta.token_ids or delta.versions:
            return delta
        return replace(delta, versions=[(self.current or 0, len(delta.token_ids))])

    def find_unknown(self, delta: Delta) -> int | None:
        """Returns the first version of a delta that was never loaded, or None."""
        if self.current is None:
            return None
        runs = (*delta.versions, *delta.all_versions)
        return next((version for version, _ in runs if version not in self._known), None)
