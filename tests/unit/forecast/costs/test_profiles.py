"""Shipped profiles can be read, and single values of a profile can be changed."""

import pytest

from interlace.core.errors import UserError
from interlace.forecast.costs.profiles import change_profile, load_profile, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_names_its_source_and_its_sizes(name: str) -> None:
    profile = load_profile(name)
    assert profile.source and profile.model and profile.sizes


def test_the_profiles_of_robots_differ_in_what_binds_their_simulators() -> None:
    on_device, on_host = load_profile("rlinf-maniskill").env, load_profile("rlinf-libero").env
    assert on_device and on_host
    assert (on_device.bound, on_host.bound) == ("device", "host")
    assert on_host.num_processes(64) == 64 * on_host.processes_per_device


def test_a_value_of_a_profile_can_be_changed_and_an_unknown_one_is_refused() -> None:
    profile = load_profile("qwen2.5-7b-h800")
    assert change_profile(profile, ["lengths.rank_correlation=0.5"]).lengths.rank_correlation == 0.5
    for unknown in ("lengths.speed=1", "nothing.at.all=1"):
        with pytest.raises(UserError, match="the profile has no such value"):
            change_profile(profile, [unknown])
