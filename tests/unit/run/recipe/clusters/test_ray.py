"""The cluster back end of processes is selected by the recipe."""

import subprocess
import sys

import pytest

from interlace.core.errors import UserError
from interlace.run.clusters.base import back_end
from interlace.run.recipe.sections import ClusterConfig


def test_without_ray_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from interlace.run.clusters.base import back_end\n"
        "from interlace.run.recipe.config import ClusterConfig\n"
        "config = ClusterConfig(backend='ray', devices='cpu:2')\n"
        "try: back_end(config).find_devices(config)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("UserError") and "pip install 'interlace[ray]'" in done.stdout


def test_devices_are_known_before_anything_is_started() -> None:
    ray = pytest.importorskip("ray")
    config, was_initialized = ClusterConfig(backend="ray", devices="cpu:3"), ray.is_initialized()
    assert [device.name for device in back_end(config).find_devices(config)] == ["cpu:0", "cpu:1", "cpu:2"]
    assert ray.is_initialized() == was_initialized


def test_a_count_of_zero_is_refused_before_ray_is_joined() -> None:
    with pytest.raises(UserError, match="'cpu:00' requests no device of the kind 'cpu'"):
        ClusterConfig(backend="ray", address="auto", devices="cpu:00")


def test_an_address_without_ray_is_refused() -> None:
    config = ClusterConfig(address="auto")
    with pytest.raises(UserError, match="Set cluster=ray"):
        back_end(config).find_devices(config)
