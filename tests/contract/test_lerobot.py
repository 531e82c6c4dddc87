"""SmolVLA, pi0 and pi0.5 agree with LeRobot's implementation, by stored fixtures (`make test-lerobot`)."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from interlace.robots.models.flow_vla import Sensed, load_flow_vla

FOLDER = os.environ.get("INTERLACE_LEROBOT_FIXTURES", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="make test-lerobot writes the fixtures, with Python 3.12 and lerobot"
)


@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_a_chunk_is_lerobot_s(kind: str) -> None:
    folder = Path(FOLDER) / kind
    network = load_flow_vla(folder).eval()
    with np.load(folder / "computed.npz") as stored:
        given = {name: torch.from_numpy(stored[name]) for name in stored}
    sensed = Sensed(
        pictures=[given["picture"]], token_ids=given["tokens"], is_real=torch.ones_like(given["tokens"]).bool(),
        state=given["state"],
    )  # fmt: skip
    torch.testing.assert_close(network.sample(sensed, given["noise"]), given["chunk"], atol=1e-4, rtol=1e-3)
