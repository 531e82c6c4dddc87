"""Public names and signatures change only on purpose."""

from tests.house.public_names import PINNED, public_names


def test_public_names_are_those_pinned() -> None:
    now, pinned = public_names(), PINNED.read_text(encoding="utf-8").splitlines()
    gone, new = sorted(set(pinned) - set(now)), sorted(set(now) - set(pinned))
    assert now == pinned, (
        f"gone: {gone}; new: {new}. Where that is meant, run `python tests/house/public_names.py` and commit its file."
    )
