"""The kinds of engines state what their engines use."""

import pytest

from interlace.core.errors import UserError
from interlace.engines.rollout.config import InterlaceConfig
from interlace.engines.rollout.kinds import create_kind, parse_engine


def test_a_served_native_engine_has_one_device() -> None:
    with pytest.raises(UserError, match=r"tensor_parallel_size = 2, .* one device; set it to 1"):
        parse_engine({"engine": "interlace", "tensor_parallel_size": 2})
    assert create_kind(InterlaceConfig()).num_devices("cuda") == 1
