"""Secrets in a run's settings: masked in config.yaml, reports and logs, kept in secrets.yaml for a resumed run.

secrets.yaml has mode 0600 and maps dotted keys to values. It is never copied into a checkpoint, a report or a logger.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from interlace.core.errors import UserError
from interlace.core.yaml_text import parse_yaml, to_yaml
from interlace.observe.atomic_file import write_atomic

if TYPE_CHECKING:
    from interlace.core.types import JSON  # loads numpy, which the command line does without

MASK = "***"
SECRETS_FILE = "secrets.yaml"
_SECRET_KEY = re.compile(r"(^|_)(key|token|secret)$|password", re.IGNORECASE)
_VARIABLES = "variables"
"""Section whose keys are names of environment variables."""
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_PUBLIC = ("pad_token", "eos_token")
"""Settings that name a token of a vocabulary."""


def mask_secrets(settings: Mapping[str, JSON]) -> tuple[dict[str, JSON], dict[str, str]]:
    """Returns the settings with every secret replaced by MASK, and the secrets by their dotted keys."""
    secrets: dict[str, str] = {}
    return {name: _mask_value(value, (name,), secrets) for name, value in settings.items()}, secrets


def _mask_value(value: JSON, path: tuple[str, ...], secrets: dict[str, str]) -> JSON:
    if isinstance(value, Mapping):
        return {name: _mask_value(inner, (*path, name), secrets) for name, inner in value.items()}
    if isinstance(value, list):
        return [_mask_value(inner, (*path, str(index)), secrets) for index, inner in enumerate(value)]
    if not isinstance(value, str) or not value or not _is_secret(path):
        return value
    if value != MASK:
        secrets[".".join(path)] = value
    return MASK


def _is_secret(path: tuple[str, ...]) -> bool:
    names = [part for part in path if not part.isdigit()]
    if len(names) > 1 and names[-2] == _VARIABLES:
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
    try:
        found = parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}. Delete it, and give the secrets as overrides.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no settings. Delete it, and give the secrets as overrides.")
    return {name: _restore_value(value, (name,), found) for name, value in settings.items()}


def _restore_value(value: JSON, path: tuple[str, ...], secrets: Mapping[str, str]) -> JSON:
    if isinstance(value, Mapping):
        return {name: _restore_value(inner, (*path, name), secrets) for name, inner in value.items()}
    if isinstance(value, list):
        return [_restore_value(inner, (*path, str(index)), secrets) for index, inner in enumerate(value)]
    return secrets.get(".".join(path), MASK) if value == MASK else value


def check_unmasked(settings: Mapping[str, JSON]) -> None:
    """Raises UserError if a secret is still masked after overrides were applied."""
    masked = list(_find_masked(settings, ()))
    if masked:
        raise UserError(
            f"{', '.join(masked)}: the value is masked ({MASK}), and {SECRETS_FILE} beside config.yaml lacks it. "
            f"Give it again: {masked[0]}=VALUE."
        )


def _find_masked(value: JSON, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _find_masked(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_masked(inner, (*path, str(index)))
    elif value == MASK and _is_secret(path):
        yield ".".join(path)
