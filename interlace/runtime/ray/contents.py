"""Contents of samples in Ray's object store, for ranks on other machines than the controller.

A rank that does not share the controller's memory puts a content into the store of its node. A reader fetches it from
the node that has it. The content is lost with the process that put it, which owns it.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from interlace.core import payload
from interlace.core.errors import PayloadLostError
from interlace.core.payload import PayloadStore, Stored
from interlace.runtime.ray.references import REFERENCES, note_named

T = TypeVar("T")


class RemoteContent(Stored[T]):
    """A value in the object store of a machine."""

    __slots__ = ("has_ended", "key", "ref")
    travels = True

    def __init__(self, key: str, ref: Any = None) -> None:
        """key: names the object across processes. ref: Ray's reference. If None, it was passed on, or follows."""
        super().__init__()
        self.key, self.ref, self.has_ended = key, ref, False
        if ref is None:
            REFERENCES.find(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if payload.is_sent_by_value(self):
            return Stored, (self.read(),)
        note_named(self)
        return RemoteContent, (self.key,)

    @property
    def is_lost(self) -> bool:
        """True if the process that owns the value has ended."""
        return self.has_ended

    def _load_parts(self) -> Sequence[NDArray[np.uint8]]:
        try:
            # The parts are copied, because the store's memory is read-only.
            return [np.array(part) for part in ray.get(REFERENCES.wait_for(self))]
        except RayError as error:
            self.has_ended = True
            raise PayloadLostError(f"the content of a sample is lost: {error}") from error


class RemotePayloads(PayloadStore):
    """Writer of values into the object store of this machine."""

    def __init__(self) -> None:
        """Needs no folder."""

    def _keep(self, parts: Sequence[memoryview]) -> Stored[Any]:
        ref = ray.put([np.frombuffer(part, np.uint8) for part in parts])
        return RemoteContent(ref.hex(), ref)
