"""Folders by which new weights reach a server on this machine."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import DiskFullError, is_full_disk
from interlace.runtime.process.shared import SharedFolder, remove_unlocked_folders
from interlace.weights.config import WeightsConfig
from interlace.weights.ref import WeightPart, WeightRef

if TYPE_CHECKING:
    from torch import Tensor

SHARED = Path("/dev/shm")
PREFIX = "served-weights-"
NAME = "model.safetensors"


class VersionFolders:
    """The folders of one server: of the served version, and of the one being loaded."""

    def __init__(self) -> None:
        self._root: SharedFolder | None = None
        """Private folder in shared memory, created with the first version."""
        self._number = 0
        self._written: list[Path] = []

    def store_tensors(self, ref: WeightRef, read: int | None) -> WeightRef:
        """Writes the tensors in a version's parts, as encoded, into files. Returns the version with their addresses.

        read: last version that the server has read. Older parts are left out if a delta is applied to that version.
        Raises DiskFullError.
        """
        folder = self._next_path()
        self._written.append(folder)
        try:
            parts = tuple(_store_part(_drop_read_parts(part, read), folder, len(ref.parts)) for part in ref.parts)
        except DiskFullError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise DiskFullError(f"{folder} is full. Make room there, or set weights.transport=folder.") from error
        return replace(ref, parts=parts)

    def write(self, tensors: "Mapping[str, Tensor]", config: Path | None) -> Path:
        """Writes tensors as a Hugging Face folder, tied tensors only once. Returns the folder.

        config: folder whose configuration is copied into it. Raises DiskFullError if there is no room.
        """
        folder = self._next_path()
        folder.mkdir()
        self._written.append(folder)
        held = dict(tensors)  # A tensor that is made when it is read would leave its address to the next one.
        once: dict[object, str] = {}
        for name, tensor in held.items():
            once.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        try:
            _write_tensors(folder / NAME, {name: held[name] for name in once.values()})
            if config is not None:
                shutil.copy2(config / "config.json", folder / "config.json")
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            if is_full_disk(error) or "No space left" in str(error):
                raise DiskFullError(f"{folder}: {error}. Make room there, or set weights.transport=folder.") from error
            raise
        return folder

    def keep(self, folder: Path | None) -> None:
        """Removes all folders but one. Files that a server has opened by a manifest stay in its memory."""
        for other in [each for each in self._written if each != folder]:
            self._written.remove(other)
            shutil.rmtree(other, ignore_errors=True)

    def _next_path(self) -> Path:
        if self._root is None:
            self._root = SharedFolder(_find_parent(), PREFIX)
        self._number += 1
        return self._root.path / f"{self._number:06d}"

    def close(self) -> None:
        if self._root is not None:
            self._root.remove()
            self._root = None


def is_never_changed(folder: Path) -> bool:
    """Returns whether VersionFolders wrote a folder. Its files may be removed, and are never written over."""
    return folder.parent.name.startswith(PREFIX) and folder.parent.parent == _find_parent()


def _write_tensors(file: Path, tensors: "Mapping[str, Tensor]") -> None:
    """Writes a safetensors file. Each tensor is copied to the host by itself."""
    from interlace.weights.codecs.base import TensorEntry
    from interlace.weights.content import bytes_of
    from interlace.weights.file_layout import make_layout

    header, places, _ = make_layout({name: TensorEntry.of(tensor) for name, tensor in tensors.items()})
    with file.open("wb") as opened:
        opened.write(header)
        for name in places:
            opened.write(bytes_of(tensors[name].detach().cpu().contiguous()))


def version_folder_of(ref: WeightRef) -> Path | None:
    """Returns the Hugging Face folder of a publication; None if it uses another transport."""
    if not ref.parts or any(part.transport != "folder" or part.codec != "raw" for part in ref.parts):
        return None
    from interlace.weights.transports.folder import FolderSource

    [folder] = {part.source.file.parent for part in ref.parts if isinstance(part.source, FolderSource)}
    return Path(folder)


def _drop_read_parts(part: WeightPart, read: int | None) -> WeightPart:
    """Drops the earlier parts that come with a delta, up to version `read`, whose part stays without an address."""
    versions = [each.version for each in part.behind]
    if read not in versions:
        return part
    base, *later = part.behind[versions.index(read) :]
    return replace(part, behind=(replace(base, source=None), *later))


def _store_part(part: WeightPart, folder: Path, num_ranks: int) -> WeightPart:
    """Writes the tensors in a part and in the earlier parts that come with it, as the transport `folder` does."""
    from interlace.weights.codecs.base import Parcel, TensorEntry
    from interlace.weights.transports.folder import FolderSender
    from interlace.weights.transports.object_store import MessageSource

    part = replace(part, behind=tuple(_store_part(each, folder, num_ranks) for each in part.behind))
    if not isinstance(part.source, MessageSource):
        return part
    tensors = part.source.tensors
    entries = {name: TensorEntry.of(tensor) for name, tensor in tensors.items()}
    parcel = Parcel(entries=entries, tensors=tensors.values(), codec=part.codec, base=part.base)
    config = WeightsConfig(transport="folder", folder=str(folder))
    sent = FolderSender(config, rank=part.rank, num_ranks=num_ranks).send(parcel, part.version, copy=True)
    return replace(part, transport="folder", source=sent.source, frozen=True)


def remove_stale_folders() -> None:
    """Removes folders of ended processes, for example of a killed run."""
    remove_unlocked_folders(_find_parent(), PREFIX)


def _find_parent() -> Path:
    return SHARED if SHARED.is_dir() and os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir())
