"""Clusters are named by the kind of their devices, and unknown kinds are refused with the nearest names."""

import pytest

from interlace.core.errors import UserError
from interlace.forecast.costs.sheets import device_names, load_sheet, parse_cluster


def test_every_data_sheet_can_be_read_and_named_in_a_cluster() -> None:
    assert {"a100", "b200", "h100", "h20", "h800", "l40s"} <= {*device_names()}
    for kind in device_names():
        size = round(load_sheet(kind).memory_bytes / 2**30)
        assert parse_cluster(f"16x{kind.upper()}-{size}GB") == (16, kind)
        assert parse_cluster(f"2x{kind}") == (2, kind)


def test_numbers_alone_name_no_kind() -> None:
    assert parse_cluster("64") is None and parse_cluster("64,32") is None


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match=r"no data sheet of the device 'h101' is known. Did you mean 'h100'"):
        parse_cluster("8xH101")
    with pytest.raises(UserError, match=r"--devices 8xH100-40GB: .* such as 8xH100-80GB"):
        parse_cluster("8xH100-40GB")
