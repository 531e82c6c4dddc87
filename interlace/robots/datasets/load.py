"""Opens a data set of recorded episodes by its layout."""

from pathlib import Path

from interlace.core.errors import UserError
from interlace.robots.datasets.episodes import EpisodeReader
from interlace.robots.datasets.hdf5_read import MINARI_FILE, MinariReader, RobomimicReader
from interlace.robots.datasets.layout import INFO, STATS
from interlace.robots.datasets.lerobot_read import LeRobotReader


def open_dataset(path: Path) -> EpisodeReader:
    """Opens a LeRobotDataset (v3), a folder of Minari, or an HDF5 file of robomimic or LIBERO.

    Raises UserError for other contents, and for a damaged data set.
    """
    if path.is_file() and path.suffix in (".hdf5", ".h5"):
        return RobomimicReader(path)
    if (path / MINARI_FILE).is_file():
        return MinariReader(path)
    if not (path / INFO).is_file():
        raise UserError(
            f"{path} is not a LeRobotDataset: {INFO} is missing. Name the folder that contains it, a folder of Minari "
            f"with {MINARI_FILE}, or an .hdf5 file of robomimic or LIBERO."
        )
    return LeRobotReader(path)


def content_of(path: Path) -> str:
    """Returns a text that changes with the content of a data set; empty if there is none."""
    if (path / STATS).is_file():
        return (path / STATS).read_text(encoding="utf-8")
    file = path if path.is_file() else path / MINARI_FILE
    if not file.is_file():
        return ""
    found = file.stat()
    return f"{found.st_size} bytes at {found.st_mtime_ns}"
