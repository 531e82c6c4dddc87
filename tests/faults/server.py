"""The server: requests that try to end or block it, or to get the answer to another request."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlparse

from tests.faults.lab import Lab, each

WELL = {"prompt": "8475>", "max_tokens": 4}
MOST_S = 2.0
"""Seconds within which /health answers beside a long prompt."""


@dataclass(frozen=True)
class Server:
    """A server that listens."""

    process: subprocess.Popen[str]
    url: str
    key: str

    def ask(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Sends one request, by POST if it has a body. Returns the status and the answer."""
        address = urlparse(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.putrequest("GET" if body is None else "POST", path)
        given = {"Authorization": f"Bearer {self.key}", "Content-Length": str(len(content)), **(headers or {})}
        for name, value in given.items():
            connection.putheader(name, value.encode())
        connection.endheaders(content)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


@contextlib.contextmanager
def serving(lab: Lab) -> Iterator[Server]:
    process = lab.start("serve", "tiny:micro", "--port", "0")
    assert process.stdout
    url = key = ""
    try:
        for line in process.stdout:
            url = found[1] if (found := re.search(r"serving on (http\S+)", line)) else url
            key = found[1] if (found := re.search(r"OPENAI_API_KEY=(\S+)", line)) else key
            if "control key" in line:
                break
        yield Server(process, url, key)
        assert process.poll() is None, f"the server ended with exit {process.returncode}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def refuses(lab: Lab, *cases: tuple[str, object, Mapping[str, str]]) -> None:
    """Each is answered by 4xx, and the next good request by 200."""
    with serving(lab) as server:
        for path, body, headers in cases:
            status, answer = server.ask(path, body, headers)
            assert 400 <= status < 500, f"{status} for {str(body)[:80]}: {answer[:200]}"
        status, answer = server.ask("/v1/completions", WELL)
        assert status == 200, answer[:200]


def parameters_that_overflow(lab: Lab) -> None:
    wrong = (
        {"logit_bias": {"60": 1e39}}, {"presence_penalty": -1e300}, {"repetition_penalty": 1e-300}, {"top_k": 2**70},
        {"temperature": 1e39}, {"logit_bias": {str(token): float("-inf") for token in range(300)}},
        {"stop_token_ids": [2**40]}, {"max_tokens": 2**70}, {"n": 10**6},
    )  # fmt: skip
    refuses(lab, *[("/v1/completions", {**WELL, **more}, {}) for more in wrong])


def requests_that_are_malformed(lab: Lab) -> None:
    large = b'{"prompt": "1>", "temperature": 1' + b"0" * 400 + b"}"
    refuses(
        lab,
        ("/v1/completions", WELL, {"Authorization": "Bearer schl\u00fcssel"}),
        ("/v1/completions", WELL, {"X-Turn": "9" * 5000}),
        ("/v1/completions", b'{"prompt": "\\ud800"}', {}),
        ("/v1/completions", large, {}),
        ("/v1/completions", {**WELL, "logit_bias": {"9" * 5000: 1}}, {}),
        ("/v1/completions", {"prompt": [2**40]}, {}),
        ("/inference/v1/generate", {"token_ids": [2**32 + 5]}, {}),
        ("/inference/v1/generate", {"token_ids": [99999]}, {}),
        ("/v1/completions", {**WELL, "guided_json": {}}, {}),
    )


def long_prompts_beside_health(lab: Lab) -> None:
    bodies = ({"prompt": "1" * (8 << 20)}, {"prompt": "1" * (1 << 20)}, {"prompt": [5] * 2_000_000})
    with serving(lab) as server:
        for body in bodies:
            content, statuses = json.dumps(body).encode(), list[int]()
            asking = threading.Thread(target=lambda: statuses.append(server.ask("/v1/completions", content)[0]))  # noqa: B023
            asking.start()
            worst_s = 0.0
            while asking.is_alive():
                start_s = time.monotonic()
                assert server.ask("/health")[0] == 200
                worst_s = max(worst_s, time.monotonic() - start_s)
                time.sleep(0.02)
            assert statuses == [400] and worst_s < MOST_S, (statuses, worst_s)


def sessions_left_open_at_an_interrupt(lab: Lab) -> None:
    with serving(lab) as server:
        for _ in range(300):
            assert server.ask("/v1/sessions", {})[0] == 200


FAULTS = each(
    [
        ("sampling parameters that overflow", parameters_that_overflow),
        ("malformed requests", requests_that_are_malformed),
        ("long prompts beside /health", long_prompts_beside_health),
        ("sessions left open at an interrupt", sessions_left_open_at_an_interrupt),
    ]
)
