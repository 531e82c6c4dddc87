"""A random value depends only on its key."""

import os
import subprocess
import sys

from hypothesis import example, given
from hypothesis import strategies as st

from interlace.core.random import Key, keyed_random, permutation, stable_hash

KEYS = st.lists(st.integers() | st.text(), min_size=1, max_size=4)
# What is put between parts, what escapes it, and letters that look like parts.
TRICKY = st.lists(st.text(alphabet="\x1f\x1eebstr:1", max_size=6) | st.integers(0, 1), min_size=1, max_size=3)


def test_the_hash_is_the_same_in_every_process() -> None:
    code = (
        "from interlace.core.random import keyed_random, permutation, stable_hash;"
        "print(stable_hash('a', 1, 'b'), keyed_random('k', 2).random(), permutation(9, 5))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(seen) == 1


def test_the_hash_is_the_same_in_every_release() -> None:
    """A checkpoint of an earlier release must resume with the same noise."""
    assert stable_hash("seed", 0) == 3576540696967919885


@given(KEYS)
def test_the_hash_fits_a_signed_64_bit_integer(key: list[Key]) -> None:
    assert 0 <= stable_hash(*key) < 2**63


@given(TRICKY, TRICKY)
@example(["a\x1fstr:b"], ["a", "b"])
@example(["a\x1e", "b"], ["a\x1eb"])
def test_a_part_cannot_look_like_two(one: list[Key], other: list[Key]) -> None:
    assert (stable_hash(*one) == stable_hash(*other)) == (one == other)


@given(KEYS, KEYS)
def test_different_keys_draw_differently(one: list[Key], other: list[Key]) -> None:
    assert (stable_hash(*one) == stable_hash(*other)) == (one == other)


def test_a_number_is_not_its_text() -> None:
    assert stable_hash(1) != stable_hash("1")


@given(st.integers(0, 200), st.integers())
def test_a_permutation_holds_each_once(size: int, key: int) -> None:
    assert sorted(permutation(size, key)) == list(range(size))


def test_generators_do_not_share_state() -> None:
    alone = keyed_random("a").random()
    first, second = keyed_random("a"), keyed_random("b")
    second.random()
    assert first.random() == alone
