"""Secrets in a run's settings: masked in config.yaml, reports and logs, kept in secrets.yaml for a resumed run.

secrets.yaml has mode 0600 and maps dotted keys to values. It is never copied into a checkpoint, a report or a logger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.yaml_text import read_mapping, to_yaml
from interlace.observe.atomic_file import write_atomic

if TYPE_CHECKING:
    from interlace.core.types import JSON  # loads numpy, which the command line does without

MASK = "***"
SECRETS_FILE = "secrets.yaml"
_SECRET_KEY = re.compile(r"(^|_|-|api|auth|access)(key|token|secret)$|password|passwd", re.IGNORECASE)
_VARIABLES = ("variables", "env")
"""Sections whose keys are names of environment variables."""
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_PUBLIC = ("pad_token", "eos_token")
"""Settings that name a token of a vocabulary."""


def mask_secrets(settings: Mapping[str, JSON]) -> tuple[dict[str, JSON], dict[str, str]]:
    """Returns the settings with every secret replaced by MASK, and the secrets by their dotted keys."""
    secrets: dict[str, str] = {}

    def mask(text: str, path: tuple[str, ...]) -> str:
        if not text or not _is_secret(path):
            return text
        if text != MASK:
            secrets[".".join(path)] = text
        return MASK

    return _map_texts(settings, mask), secrets


def _map_texts(settings: Mapping[str, JSON], change: Callable[[str, tuple[str, ...]], str]) -> dict[str, JSON]:
    """Returns the settings with each text replaced. change: takes the text and its path."""

    def replace(value: JSON, path: tuple[str, ...]) -> JSON:
        if isinstance(value, Mapping):
            return {name: replace(inner, (*path, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [replace(inner, (*path, str(index))) for index, inner in enumerate(value)]
        return change(value, path) if isinstance(value, str) else value

    return {name: replace(value, (name,)) for name, value in settings.items()}


def _is_secret(path: tuple[str, ...]) -> bool:
    names = [part for part in path if not part.isdigit()]
    if len(names) > 1 and names[-2] in _VARIABLES:
        return bool(_SECRET_VARIABLE.search(names[-1]))
    return bool(_SECRET_KEY.search(names[-1])) and names[-1] not in _PUBLIC


def write_secrets(folder: Path, secrets: Mapping[str, str]) -> None:
    """Writes secrets.yaml next to config.yaml, readable by its owner only; removes it if there are no secrets."""
    path = folder / SECRETS_FILE
    if secrets:
        write_atomic(path, to_yaml(dict(secrets)), synced=True, mode=0o600)
    else:
        path.unlink(missing_ok=True)


def restore_secrets(settings: dict[str, JSON], config: Path) -> dict[str, JSON]:
    """Returns the settings of a config.yaml, with MASK replaced by the values in secrets.yaml of the same folder."""
    path = config.with_name(SECRETS_FILE)
    remedy = "Delete it, and give the secrets as overrides."
    found = read_mapping(path, remedy=remedy) if path.is_file() else {}
    secrets = {name: value for name, value in found.items() if isinstance(value, str)}
    return _map_texts(settings, lambda text, path: secrets.get(".".join(path), MASK) if text == MASK else text)


def check_unmasked(settings: Mapping[str, JSON]) -> None:
    """Raises UserError if a secret is still masked after overrides were applied."""
    masked: list[str] = []

    def find(text: str, path: tuple[str, ...]) -> str:
        if text == MASK and _is_secret(path):
            masked.append(".".join(path))
        return text

    _map_texts(settings, find)
    if masked:
        raise UserError(
            f"{', '.join(masked)}: the value is masked ({MASK}), and {SECRETS_FILE} beside config.yaml lacks it. "
            f"Give it again: {masked[0]}=VALUE."
        )
