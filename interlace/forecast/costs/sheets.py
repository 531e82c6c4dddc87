"""Data sheets of devices, one YAML file for each kind."""

import re
from pathlib import Path

from pydantic import Field

from interlace.core.config import Config
from interlace.core.errors import UserError, nearest
from interlace.core.yaml_text import read_mapping

FOLDER = Path(__file__).parent / "devices"
_CLUSTER = re.compile(r"(\d+)x([a-z]\w*)(?:-(\d+)gb)?", re.IGNORECASE)


class DataSheet(Config):
    """Data sheet of one kind of device."""

    name: str
    flops: float = Field(gt=0)
    """Dense bf16 operations per second."""
    bytes_per_s: float = Field(gt=0)
    """Memory bandwidth."""
    memory_bytes: int = Field(gt=0)
    host_bytes_per_s: float = Field(gt=0)
    """Bandwidth between host and device."""
    link_bytes_per_s: float = Field(gt=0)
    """Bandwidth of a device to the others of its node, in one direction."""
    network_bytes_per_s: float = Field(gt=0)
    """Bandwidth of a device to other nodes, in one direction: of a usual cluster, with a network card per device."""
    node_devices: int = Field(default=8, ge=1)
    """Devices of a node."""


def device_names() -> list[str]:
    """Returns the kinds of devices that have a data sheet, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_sheet(kind: str) -> DataSheet:
    """Loads the data sheet of a kind of device. Raises UserError for an unknown kind."""
    if kind not in device_names():
        raise UserError(
            f"no data sheet of the device {kind!r} is known.{nearest(kind, device_names())} For others, measure a "
            "profile on the device and give --profile."
        )
    return DataSheet.parse(read_mapping(FOLDER / f"{kind}.yaml", f"device {kind!r}"), where=f"device {kind}")


def parse_cluster(text: str) -> tuple[int, str] | None:
    """Parses `8xH100-80GB` as a number of devices and their kind; None if the text has another form.

    Raises UserError for an unknown kind, or a memory size that the kind does not have.
    """
    found = _CLUSTER.fullmatch(text.strip())
    if found is None:
        return None
    count, kind, size = int(found[1]), found[2].lower(), found[3]
    sheet = load_sheet(kind)
    here = round(sheet.memory_bytes / 2**30)
    if count < 1 or (size and int(size) != here):
        raise UserError(
            f"--devices {text}: write a number of 1 or more and the kind, such as 8x{kind.upper()}-{here}GB."
        )
    return count, kind
