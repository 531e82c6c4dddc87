"""Errors keep what they know on their way between processes."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import RemoteError, nearest


def test_a_remote_error_survives_the_way_home() -> None:
    error = RemoteError("rollout", 3, "generate", "Traceback: boom")
    back = pickle.loads(pickle.dumps(error))
    assert (back.group, back.rank, back.method, back.remote_traceback) == ("rollout", 3, "generate", "Traceback: boom")
    assert str(back) == str(error)
    assert "rollout[rank 3].generate()" in str(back)


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True))
def test_a_known_name_is_always_its_own_nearest(options: list[str]) -> None:
    assert f"Did you mean {options[0]!r}?" in nearest(options[0], options)


def test_a_name_is_near_however_it_is_capitalised() -> None:
    assert "Did you mean 'areal'?" in nearest("AReaL", ["areal", "magistral"])
