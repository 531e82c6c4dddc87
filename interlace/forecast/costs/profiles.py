"""Shipped profiles and profile files."""

from collections.abc import Sequence
from pathlib import Path

from interlace.core.errors import UserError, nearest
from interlace.core.yaml_text import parse_yaml, read_mapping
from interlace.forecast.profile.types import Profile

FOLDER = Path(__file__).parent / "profiles"


def profile_names() -> list[str]:
    """Returns the shipped profiles, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def change_profile(profile: Profile, changes: Sequence[str]) -> Profile:
    """Returns a profile with some values changed. changes: dotted keys and values, such as `lengths.median=500`.

    Raises UserError for an unknown key.
    """
    data: dict[str, object] = profile.model_dump()
    for change in changes:
        key, _, text = change.partition("=")
        *sections, last = key.split(".")
        place: object = data
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last not in place:
            raise UserError(f"profile.{key}: the profile has no such value to change.")
        place[last] = parse_yaml(text)
    return Profile.parse(data, where="profile")


def load_profile(spec: str | None) -> Profile:
    """Loads a shipped profile or a file, written by `interlace profile` or by hand.

    Raises UserError for an unknown name, a file that cannot be read, and None.
    """
    if spec is None:
        raise UserError(
            "--profile is missing: measure one with `interlace profile RECIPE`, or take a shipped one: "
            f"{', '.join(profile_names())}."
        )
    path = Path(spec) if spec.endswith((".json", ".yaml", ".yml")) else FOLDER / f"{spec}.yaml"
    if path.parent == FOLDER and spec not in profile_names():
        measure = " Measure one with `interlace profile RECIPE`, and give the path of its file."
        raise UserError(f"unknown profile {spec!r}.{nearest(spec, profile_names())}{measure}")
    return Profile.parse(read_mapping(path, f"profile {spec!r}"), where=f"profile {spec}")
