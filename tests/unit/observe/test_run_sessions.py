"""A session states command, versions and machine, and never a secret."""

from pathlib import Path

from interlace.observe.run_sessions import SESSIONS_FILE, mask_command, read_sessions, record_session


def test_each_process_is_a_line_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    for command in (["interlace", "train", "quickstart"], ["interlace", "train", "--resume"]):
        record_session(tmp_path, command)
    with (tmp_path / SESSIONS_FILE).open("a") as file:
        file.write('{"started_at": "2026-')
    first, second = read_sessions(tmp_path)
    assert first.command == "interlace train quickstart" and second.command == "interlace train --resume"
    assert {"python", "interlace", "torch"} <= set(first.versions)
    assert "cores" in first.machine and first.host


def test_a_command_with_a_line_separator_of_unicode_is_one_line(tmp_path: Path) -> None:
    record_session(tmp_path, ["interlace", "train", "x", "task.format.system=one\u2028two"])
    [session] = read_sessions(tmp_path)
    assert "one\u2028two" in session.command


def test_a_folder_without_sessions_has_none(tmp_path: Path) -> None:
    assert read_sessions(tmp_path) == []


def test_secrets_of_the_command_are_masked() -> None:
    shown = mask_command(
        [
            "/bin/interlace",
            "train",
            "x",
            "rollout.api_key=s3cret",
            "--api-key",
            "s3cret",
            "model={hub_token: s3cret}",
        ]
    )
    assert "s3cret" not in shown and shown.startswith("interlace train x")
    assert mask_command(["/x/interlace/__main__.py", "train", "y"]) == "python -m interlace train y"
    assert mask_command(["i", "train", "steps=3", "model.pad_token=<pad>"]) == "i train steps=3 'model.pad_token=<pad>'"
