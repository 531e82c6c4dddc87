"""Programs run as episodes: their input, their reward and their end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from interlace.agents.episodes import program_groups
from interlace.agents.episodes.program import REST_WITHIN_S, _end_streams
from interlace.core.errors import InterlaceError, UserError
from interlace.core.messages import Message
from interlace.core.types import JSON, FinishReason, Prompt
from interlace.rollouts.base import Outcome
from interlace.rollouts.config import create_kind, parse_episode
from interlace.rollouts.episode_process import LEAVE_S
from tests.support.scripted_session import ScriptedSession

pytest.importorskip("aiohttp")
HELLO = Message(role="assistant", content="hello")
ROW = Prompt(
    uid="sums/3", token_ids=np.arange(3, dtype=np.int32), text="<user>1+1", answer="2",
    messages=(Message(role="user", content="1+1"),), metadata={"level": 4},
)  # fmt: skip
CLIENT = """
import json, os, sys, urllib.request
def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data=json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    return json.load(urllib.request.urlopen(request))
def ask(text):
    body = {"model": "gpt", "messages": [{"role": "user", "content": text}]}
    return post("/chat/completions", body)["choices"][0]["message"]["content"]
"""


def outcome(session: ScriptedSession, row: Prompt = ROW, **settings: object) -> Outcome:
    config = parse_episode({"name": "program", **settings})
    episode = create_kind(config).create()
    return asyncio.run(asyncio.wait_for(episode.run(row, session), 20))


def command(code: str, *arguments: str) -> list[str]:
    return ["python", "-c", CLIENT + code, *arguments]


def call(base_url: str, api_key: str, path: str, body: object) -> dict:
    request = urllib.request.Request(base_url + path, data=json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {api_key}")
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def answers_well(row: Mapping[str, JSON], base_url: str, api_key: str) -> float:
    """A program that is a function."""
    assert (row["prompt"], row["level"], row["uid"]) == ("1+1", 4, "sums/3")
    ask = {"model": "gpt", "messages": row["messages"]}
    found = call(base_url, api_key, "/chat/completions", ask)
    return float(found["choices"][0]["message"]["content"] == "hello")


async def rewards_by_the_route(row: Mapping[str, JSON], base_url: str, api_key: str) -> None:
    await asyncio.to_thread(call, base_url, api_key, "/session/reward", {"reward": 0.5})


def rewards_by_the_route_and_returns_an_outcome(row: Mapping[str, JSON], base_url: str, api_key: str) -> Outcome:
    call(base_url, api_key, "/session/reward", {"reward": 0.5})
    return Outcome(reward=1.0, text="a", finish_reason=FinishReason.LENGTH, valid={0: np.zeros(3, np.bool_)})


def returns_a_list(row: Mapping[str, JSON], base_url: str, api_key: str) -> list[int]:
    return [1]


def test_a_program_reaches_the_server_though_its_machine_has_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("http_proxy", "http://127.0.0.1:9"), ("no_proxy", "intranet"), ("NO_PROXY", "")):
        monkeypatch.setenv(name, value)
    assert outcome(ScriptedSession([HELLO]), command=command("print(ask('1+1'))")).text == "hello"
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "intranet,127.0.0.1"


def test_a_functions_number_is_its_reward_and_the_reward_route_counts_before_it() -> None:
    session = ScriptedSession([HELLO])
    assert outcome(session, function=f"{__name__}:answers_well").reward == 1.0
    assert session.asked[0][0] == [Message(role="user", content="1+1")]
    assert outcome(ScriptedSession([]), function=f"{__name__}:rewards_by_the_route").reward == 0.5
    with pytest.raises(TypeError, match="returned a list"):
        outcome(ScriptedSession([]), function=f"{__name__}:returns_a_list")


def test_a_reward_of_the_route_keeps_the_rest_of_the_outcome() -> None:
    """Tokens that had no effect were trained, and a truncated episode counted as ended."""
    found = outcome(ScriptedSession([]), function=f"{__name__}:rewards_by_the_route_and_returns_an_outcome")
    assert (found.reward, found.text, found.finish_reason) == (0.5, "a", FinishReason.LENGTH)
    assert not found.valid[0].any()


def test_a_command_gets_its_row_and_its_output_is_scored() -> None:
    session = ScriptedSession([HELLO])
    code = "row = json.load(sys.stdin); print(ask(sys.argv[1]), row['level'], os.environ['INTERLACE_SEED'])"
    found = outcome(session, command=command(code, "what is {prompt}?"))
    assert (found.text, found.reward) == ("hello 4 7", None)
    assert session.asked[0][0] == [Message(role="user", content="what is 1+1?")]


def test_exit_status_and_reward_route_of_a_command() -> None:
    assert outcome(ScriptedSession([]), command=command("sys.exit(3)"), result="exit").reward == 0.0
    assert outcome(ScriptedSession([]), command=command(""), result="exit").reward == 1.0
    given = "post('/session/reward', {'reward': 0.25})"
    assert outcome(ScriptedSession([]), command=command(given), result="exit").reward == 0.25
    with pytest.raises(InterlaceError, match=r"(?s)exit status 1: .*ValueError: no"):
        outcome(ScriptedSession([]), command=command("raise ValueError('no')"))


def test_secrets_of_the_run_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HARMLESS", "1")
    code = "print(os.environ.get('WANDB_API_KEY'), os.environ['HARMLESS'], os.environ['MINE'])"
    found = outcome(ScriptedSession([]), command=command(code), variables={"MINE": "2"})
    assert found.text == "None 1 2"


def test_what_a_command_left_behind_ends_with_it_and_its_output_is_bounded() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid); print('x' * 10**6)"
    start = time.monotonic()
    found = outcome(ScriptedSession([]), command=command(code), stdout_bytes=1000)
    assert found.text is not None and len(found.text) <= 1000 and time.monotonic() - start < 10
    _wait_for_the_end(int(found.text.split()[0]))


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_daemon_that_holds_the_output_open_delays_no_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_given_up: bool
) -> None:
    """Its sample ran into the time limit of the episode, and after a cancellation it hung for ever."""
    monkeypatch.setattr("interlace.agents.episodes.program.REST_WITHIN_S", 0.2)
    place = tmp_path / "pid"
    code = "import subprocess, time; daemon = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    code += f"print('done', flush=True); open({str(place)!r}, 'w').write(str(daemon.pid)); "
    code += f"time.sleep({600 * is_given_up})"
    episode = create_kind(parse_episode({"name": "program", "command": command(code)})).create()

    async def run() -> Outcome | None:
        task = asyncio.ensure_future(episode.run(ROW, ScriptedSession([])))
        while not place.exists() or not place.read_text():
            await asyncio.sleep(0.01)
        if not is_given_up:
            return await task
        task.cancel()
        await asyncio.wait({task})
        return None

    try:
        found = asyncio.run(asyncio.wait_for(run(), 10))
        assert found is None if is_given_up else found is not None and found.text == "done"
    finally:
        os.kill(int(place.read_text()), signal.SIGKILL)


def test_a_cancelled_command_ends_before_its_process_is_replaced() -> None:
    """A daemon that held its output cost the process and its other episodes."""
    assert REST_WITHIN_S < LEAVE_S / 2


def test_a_daemon_with_the_input_of_a_command_leaks_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample with a row larger than a pipe left one open."""
    monkeypatch.setattr("interlace.agents.episodes.program.REST_WITHIN_S", 0.1)
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    episode = create_kind(parse_episode({"name": "program", "command": command(code)})).create()
    row = replace(ROW, metadata={"page": "a" * (1 << 20)})

    async def count_open() -> int:
        found = await episode.run(row, ScriptedSession([]))
        assert found is not None and found.text is not None
        try:
            await asyncio.sleep(0.1)
            return sum(1 for _ in Path("/proc/self/fd").iterdir())
        finally:
            os.kill(int(found.text), signal.SIGKILL)

    async def count_twice() -> tuple[int, int]:
        await count_open()  # the first sample starts the server of the sessions
        return await count_open(), await count_open()

    before, after = asyncio.run(count_twice())
    assert before == after


def test_a_cancellation_is_not_lost_while_the_streams_of_a_command_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.agents.episodes.program.REST_WITHIN_S", 0.05)

    async def run() -> bool:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("true", stdin=pipe, stdout=pipe, stderr=pipe)
        ending = asyncio.Event()

        async def end_late() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await asyncio.sleep(0.1)

        talk = asyncio.gather(end_late(), asyncio.sleep(0), asyncio.sleep(0))
        task = asyncio.ensure_future(_end_streams(process, talk))
        await ending.wait()
        task.cancel()
        await asyncio.wait({task, talk})
        await process.wait()
        return task.cancelled()

    assert asyncio.run(run())


def test_a_command_that_is_given_up_is_killed(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    code = f"import time; open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    episode = create_kind(parse_episode({"name": "program", "command": command(code)})).create()

    async def give_up() -> None:
        run = asyncio.ensure_future(episode.run(ROW, ScriptedSession([])))
        while not place.exists() or not place.read_text():
            await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(give_up())
    _wait_for_the_end(int(place.read_text()))


WITHOUT_SETPRIV = "from interlace.core import processes; processes._death_signal = lambda: (); "


@pytest.mark.parametrize("has_setpriv", [True, False])
def test_a_command_and_its_children_end_with_the_process_that_started_it(tmp_path: Path, *, has_setpriv: bool) -> None:
    """A worker that is killed runs no code, so another process ends the program. Its children stayed."""
    place = tmp_path / "pids"
    code = "import subprocess, time; child = subprocess.Popen(['sleep', '600'])\n"
    code += f"open({str(place)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}.'); time.sleep(600)"
    names = "ScriptedSession, command, outcome"
    start = f"from {__name__} import {names}; outcome(ScriptedSession([]), command=command({code!r}))"
    worker = subprocess.Popen([sys.executable, "-c", ("" if has_setpriv else WITHOUT_SETPRIV) + start])
    while not place.exists() or not place.read_text().endswith("."):
        assert worker.poll() is None
        time.sleep(0.01)
    worker.kill()
    worker.wait()
    for pid in place.read_text().removesuffix(".").split():
        _wait_for_the_end(int(pid))


@pytest.mark.parametrize(
    "replaced",
    [
        "groups._killer.kill(); groups._killer.wait()",
        "groups._killer.send_signal(19); [groups.add(programs[0].pid) for _ in range(40_000)]",
    ],
)
def test_programs_end_with_their_process_after_the_process_that_kills_them_was_replaced(replaced: str) -> None:
    """Also those that were started before; those that have ended are not killed again."""
    code = (
        "import subprocess, sys\n"
        "from interlace.agents.episodes.program_groups import ProgramGroups\n"
        "groups = ProgramGroups()\n"
        "programs = [subprocess.Popen(['sleep', '600'], start_new_session=True) for _ in range(3)]\n"
        "groups.add(programs[0].pid); groups.add(programs[1].pid); groups.remove(programs[1].pid)\n"
        f"{replaced}; groups.add(programs[2].pid)\n"
        "print(*[each.pid for each in programs], flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as worker:  # type: ignore[call-overload]
        first, removed, last = map(int, worker.stdout.readline().split())
        worker.kill()
    _wait_for_the_end(first)
    _wait_for_the_end(last)
    assert _is_alive(removed)
    os.kill(removed, signal.SIGKILL)


def test_a_line_that_was_cut_ends_no_group() -> None:
    """If the process is killed while it writes +12345, the other process read +12, and killed group 12."""
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        killer = [sys.executable, "-I", "-S", program_groups.__file__]
        subprocess.run(killer, input=f"+{program.pid}".encode(), check=True)
        time.sleep(0.1)
        assert _is_alive(program.pid)
        subprocess.run(killer, input=f"+{program.pid}\n".encode(), check=True)
        assert program.wait(5) == -signal.SIGKILL
    finally:
        program.kill()
        program.wait()


def test_a_command_runs_to_its_end_if_no_further_process_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error came again in the cleanup, which left the streams and the process of the command."""
    groups = program_groups.ProgramGroups()

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is free")

    monkeypatch.setattr(program_groups, "subprocess", SimpleNamespace(Popen=fail, PIPE=-1, DEVNULL=-3))
    monkeypatch.setattr("interlace.agents.episodes.program.program_groups", lambda: groups)
    assert outcome(ScriptedSession([]), command=["echo", "done"]).text == "done"


def test_a_command_whose_interpreter_is_missing_fails_its_sample(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/missing/python\n", encoding="utf-8")
    script.chmod(0o700)
    with pytest.raises((InterlaceError, FileNotFoundError), match=r"script"):
        outcome(ScriptedSession([]), command=[str(script)], result="exit")


def test_sessions_have_a_key_each_and_the_server_ends_with_the_last() -> None:
    episode = create_kind(parse_episode({"name": "program", "function": f"{__name__}:answers_well"})).create()

    async def several() -> list[Outcome]:
        sessions = [ScriptedSession([HELLO]) for _ in range(5)]
        found = await asyncio.gather(*(episode.run(ROW, session) for session in sessions))
        assert [len(session.turns) for session in sessions] == [1] * 5
        assert episode._host._server is None
        return found

    assert [found.reward for found in asyncio.run(several())] == [1.0] * 5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "set one of `command` and `function`"),
        ({"command": ["x"], "function": "a:b"}, "set one of"),
        ({"command": ["x"], "distribution": "theirs"}, "episode program: distribution"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_episode({"name": "program", **settings})


def test_tools_are_those_that_the_recipe_names_in_openais_form() -> None:
    pytest.importorskip("openai")
    mapping = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    given = ["interlace.agents.examples.program_agent:TOOL", mapping]
    kind = create_kind(parse_episode({"name": "program", "command": ["true"], "shown_tools": given}))
    kind.check()
    assert [tool.name for tool in kind.tools()] == ["calculator", "look"]
    wrong = create_kind(parse_episode({"name": "program", "command": ["true"], "shown_tools": [f"{__name__}:HELLO"]}))
    with pytest.raises(UserError, match="is a Message, no mapping in OpenAI's form"):
        wrong.check()


MANY = 24
TOGETHER = threading.Barrier(MANY)


def meets_the_others(row: Mapping[str, JSON], base_url: str, api_key: str) -> float:
    TOGETHER.wait(timeout=10)
    return 1.0


def test_functions_run_side_by_side_however_many_cores_there_are() -> None:
    episode = create_kind(parse_episode({"name": "program", "function": f"{__name__}:meets_the_others"})).create()

    async def run() -> list[Outcome]:
        return await asyncio.gather(*(episode.run(ROW, ScriptedSession([])) for _ in range(MANY)))

    assert [found.reward for found in asyncio.run(run())] == [1.0] * MANY


def test_a_function_that_is_not_there_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match="has no 'nowhere'"):
        create_kind(parse_episode({"name": "program", "function": f"{__name__}:nowhere"})).check()


def _wait_for_the_end(pid: int) -> None:
    """A process that was killed is there until the kernel comes to it."""
    deadline = time.monotonic() + 5
    while _is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
