"""`interlace serve`, started as by a user, answers OpenAI's client."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.robot_server import CHUNK, dot_observation, settings_of

pytestmark = pytest.mark.slow
openai = pytest.importorskip("openai")


def ignore_interrupts() -> None:
    """Does as the shell of a script does for what it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start(*arguments: str) -> "subprocess.Popen[str]":
    """Starts the command, on a free port."""
    program = "from interlace.cli.main import app; app()"
    command = [sys.executable, "-c", program, "serve", *arguments, "--port", "0"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}, preexec_fn=ignore_interrupts
    )


def test_a_model_is_served_until_it_is_stopped() -> None:
    server = start("tiny:micro")
    assert server.stdout is not None
    try:
        said = "".join(server.stdout.readline() for _ in range(4))
        url, key = re.findall(r"OPENAI_BASE_URL=(\S+)|OPENAI_API_KEY=(\S+)", said)
        client = openai.OpenAI(base_url=url[0], api_key=key[1])
        same = [client.completions.create(model="any", prompt="hello", max_tokens=5, seed=1) for _ in range(2)]
        assert same[0].choices[0].text == same[1].choices[0].text
        assert same[0].usage.completion_tokens == 5
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url[0], api_key="other").models.list()
        with pytest.raises(openai.BadRequestError, match="tokens, and an engine holds"):
            client.completions.create(model="any", prompt=[5] * 100_000)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0


def test_a_robots_policy_is_served_until_it_is_stopped(tmp_path: Path) -> None:
    from interlace.robots.serving.client import PolicyClient

    server = start("robot-pendulum", *settings_of("flow", tmp_path), "--policy", "--api-key", "secret")
    assert server.stdout is not None
    try:
        said = "".join(server.stdout.readline() for _ in range(2))
        (url,) = re.findall(r"serving the policy on (ws://\S+)", said)
        with PolicyClient(url, "secret") as client:
            assert client.act(dot_observation()).actions.shape == (CHUNK, 1)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
