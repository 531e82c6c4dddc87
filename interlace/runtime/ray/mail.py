"""Directory of mailboxes on a Ray cluster: entries of its key-value store."""

import os
from pathlib import Path

import ray
from ray.experimental import internal_kv

from interlace.core.payload import PayloadStore
from interlace.runtime.ray.contents import RemotePayloads


class StoreDirectory:
    """A directory for ranks on any machine of the cluster."""

    def __init__(self, run: str, shared: Path | None) -> None:
        """run: identifier of the run, unique in the cluster."""
        self.run, self.shared = run, shared
        self.process = os.getpid()

    @property
    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def open_remote_store(self) -> PayloadStore:
        return RemotePayloads()

    def publish(self, name: str, address: str) -> None:
        internal_kv._internal_kv_put(self._make_key(name), address.encode(), overwrite=True)

    def find(self, name: str) -> str | None:
        found = internal_kv._internal_kv_get(self._make_key(name))
        return None if found is None else str(found.decode())

    def clear(self) -> None:
        for key in internal_kv._internal_kv_list(self._make_key("")):
            internal_kv._internal_kv_del(key)

    def _make_key(self, name: str) -> bytes:
        return f"interlace-mail-{self.run}-{name}".encode()
