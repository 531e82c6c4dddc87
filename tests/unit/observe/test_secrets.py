"""Secrets are masked in every file that people share, but a resumed run still has them."""

import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.yaml_text import parse_yaml
from interlace.observe.run_folder import RunFolder
from interlace.observe.secrets import MASK, check_unmasked, mask_secrets, restore_secrets


class Program(Config):
    variables: Mapping[str, str] = {"SEARCH_API_KEY": "sk-1", "LOG_LEVEL": "info"}


class Settings(Config):
    api_key: str = "sk-2"
    hub_token: str = "hf-3"
    db_password: str = "pw-4"
    pad_token: str = "<pad>"
    max_new_tokens: int = 7
    episode: Program = Program()


def test_config_yaml_masks_keys_tokens_passwords_and_secret_variables(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a")
    folder.write_config(Settings())
    text = folder.config.read_text()
    assert not any(secret in text for secret in ("sk-1", "sk-2", "hf-3", "pw-4"))
    assert "<pad>" in text and "info" in text and "max_new_tokens: 7" in text


def test_the_environment_of_a_tool_and_joined_names_are_masked() -> None:
    tool = {
        "env": {"SERVICE_KEY_ID": "a", "REGION": "eu"},
        "options": {"apikey": "b", "accessToken": "c", "monkey": "d"},
    }
    masked, secrets = mask_secrets({"episode": {"tools": [tool]}})
    assert sorted(secrets.values()) == ["a", "b", "c"]
    assert masked["episode"]["tools"][0]["env"]["REGION"] == "eu"


def test_a_resumed_run_reads_the_secrets_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a")
    folder.write_config(Settings())
    restored = restore_secrets(parse_yaml(folder.config.read_text()), folder.config)
    assert Settings.model_validate(restored) == Settings()


def test_the_run_and_its_secrets_belong_to_their_owner_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a")
    folder.write_config(Settings())
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "secrets.yaml").stat().st_mode) == 0o600
    folder.path.chmod(0o755)
    assert stat.S_IMODE(RunFolder.resume(tmp_path, "a").path.stat().st_mode) == 0o700


def test_a_secret_that_is_lost_is_requested_by_its_key(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a")
    folder.write_config(Settings())
    (folder.path / "secrets.yaml").unlink()
    restored = restore_secrets(parse_yaml(folder.config.read_text()), folder.config)
    with pytest.raises(UserError, match="api_key=VALUE"):
        check_unmasked(restored)


def test_a_null_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "secrets.yaml").write_text("api_key: null\n")
    assert restore_secrets({"api_key": MASK}, tmp_path / "config.yaml") == {"api_key": MASK}


def test_masked_settings_stay_masked() -> None:
    masked, secrets = mask_secrets({"api_key": "x"})
    assert secrets == {"api_key": "x"} and mask_secrets(masked) == ({"api_key": MASK}, {})
