"""Markets of devices: rates of interruptions, seconds of a restart and prices, one YAML file for each."""

from pathlib import Path

from pydantic import Field

from interlace.core.config import Config
from interlace.core.errors import UserError, nearest
from interlace.core.yaml_text import read_mapping

FOLDER = Path(__file__).parent / "markets"
DAY_S = 86_400.0


class Market(Config):
    """A way of renting devices."""

    name: str
    interruptions_per_node_day: float = Field(ge=0)
    """Failures and withdrawals of a node in a day."""
    node_devices: int = Field(ge=1)
    """Devices of a node, which are interrupted together."""
    restart_s: float = Field(ge=0)
    """Seconds from an interruption until the same processes are ready on another node."""
    price_share: float = Field(default=1.0, gt=0)
    """Price of a device as a share of its price on demand."""

    @property
    def per_node_s(self) -> float:
        """Interruptions of a node in a second."""
        return self.interruptions_per_node_day / DAY_S


def market_names() -> list[str]:
    """Returns the shipped markets, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_market(spec: str) -> Market:
    """Loads a shipped market or a YAML file. Raises UserError for an unknown name and a file that cannot be read."""
    is_file = spec.endswith((".yaml", ".yml"))
    if not is_file and spec not in market_names():
        raise UserError(
            f"unknown market {spec!r}.{nearest(spec, market_names())} Give one of {', '.join(market_names())}, or a "
            "YAML file with the same keys."
        )
    path = Path(spec) if is_file else FOLDER / f"{spec}.yaml"
    return Market.parse(read_mapping(path, f"market {spec!r}"), where=f"market {spec}")
