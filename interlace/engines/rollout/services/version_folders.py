"""Folders and manifests by which new weights reach a server on this machine."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import DiskFullError, is_full_disk
from interlace.engines.rollout.services.manifest import SUFFIX, write_manifest
from interlace.runtime.process.shared import SharedFolder, remove_unlocked_folders
from interlace.weights.ref import WeightRef

if TYPE_CHECKING:
    from torch import Tensor

SHARED = Path("/dev/shm")
PREFIX = "served-weights-"
NAME = "model.safetensors"


class VersionFolders:
    """The folders and manifests of one server: of the served version, and of the one being loaded."""

    def __init__(self) -> None:
        self._root: SharedFolder | None = None
        """Private folder in shared memory, created with the first version."""
        self._number = 0
        self._written: list[Path] = []

    def write_manifest(self, ref: WeightRef) -> Path:
        """Writes a manifest of a version (see can_write_manifest()). Returns the file."""
        file = self._next_path().with_suffix(SUFFIX)
        write_manifest(ref, file)
        self._written.append(file)
        return file

    def write(self, tensors: "Mapping[str, Tensor]", config: Path | None) -> Path:
        """Writes tensors as a Hugging Face folder, tied tensors only once. Returns the folder.

        config: folder whose configuration is copied into it. Raises DiskFullError if there is no room.
        """
        from safetensors.torch import save_file

        folder = self._next_path()
        folder.mkdir()
        self._written.append(folder)
        once: dict[object, str] = {}
        for name, tensor in tensors.items():
            once.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        kept = {name: tensors[name].detach().cpu().contiguous() for name in once.values()}
        try:
            save_file(kept, folder / NAME, metadata={"format": "pt"})
            if config is not None:
                shutil.copy2(config / "config.json", folder / "config.json")
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            if is_full_disk(error) or "No space left" in str(error):
                raise DiskFullError(f"{folder}: {error}. Make room there, or set weights.transport=folder.") from error
            raise
        return folder

    def keep(self, source: Path) -> None:
        """Removes all folders and manifests but the given one, which the server serves."""
        for other in [each for each in self._written if each != source]:
            self._written.remove(other)
            other.unlink() if other.is_file() else shutil.rmtree(other, ignore_errors=True)

    def _next_path(self) -> Path:
        if self._root is None:
            self._root = SharedFolder(_find_parent(), PREFIX)
        self._number += 1
        return self._root.path / f"{self._number:06d}"

    def close(self) -> None:
        if self._root is not None:
            self._root.remove()
            self._root = None


def version_folder_of(ref: WeightRef) -> Path | None:
    """Returns the Hugging Face folder of a publication; None if it uses another transport."""
    if not ref.parts or any(part.transport != "folder" or part.codec != "raw" for part in ref.parts):
        return None
    from interlace.weights.transports.folder import FolderSource

    [folder] = {part.source.file.parent for part in ref.parts if isinstance(part.source, FolderSource)}
    return Path(folder)


def remove_stale_folders() -> None:
    """Removes folders of ended processes, for example of a killed run."""
    remove_unlocked_folders(_find_parent(), PREFIX)


def _find_parent() -> Path:
    return SHARED if SHARED.is_dir() and os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir())
