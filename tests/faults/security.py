"""Security: listening sockets, unpickled data and executed code."""

import json
import os
import pickle
import re
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.lab import LIMIT_S, REPOSITORY, Ended, Lab, each
from tests.support.listening import listening_addresses

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._mark),)


def family_of(pid: int) -> list[int]:
    """A process and all that it started."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(one for child in children for one in family_of(child))]


def listens(lab: Lab, *settings: str) -> set[str]:
    """Addresses that a run's processes listen on at its third step."""
    from tests.support.training import SMALL

    cache = f"model.cache_dir={lab.shared.cache}"
    process = lab.start("train", "quickstart", *SMALL, cache, "steps=500", *settings, "--name", "x")
    assert process.stdout
    try:
        next(line for line in process.stdout if line.startswith("step 3/"))
        return {address for pid in family_of(process.pid) for address in listening_addresses(pid)}
    finally:
        process.kill()
        process.communicate()


def local_ranks_listen(lab: Lab) -> None:
    found = listens(lab, "actor.ranks=2")
    assert found <= LOOPBACK, found


def one_rank_listens(lab: Lab) -> None:
    found = listens(lab)
    assert not found, found


def payload_in_weights(lab: Lab) -> None:
    """As torch.save writes them, under the name that transformers would take."""
    mark = lab.folder / "ran"
    (lab.newest / "model.safetensors").unlink()
    code = "import torch, sys; from tests.faults.security import Payload; from pathlib import Path; "
    code += "torch.save({'model.embed_tokens.weight': Payload(Path(sys.argv[1]))}, sys.argv[2])"
    subprocess.run(
        [sys.executable, "-c", code, str(mark), str(lab.newest / "pytorch_model.bin")], cwd=REPOSITORY, check=True
    )
    lab.train(f"model={lab.newest}", "--overwrite", "--name", "y").refused()
    assert not mark.exists()


def code_beside_a_model(lab: Lab) -> None:
    mark = lab.folder / "ran"
    (lab.newest / "evil.py").write_text(f"import os; os.mkdir({str(mark)!r})")
    config = json.loads((lab.newest / "config.json").read_text())
    remote = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    config |= {"model_type": "unheard-of", "auto_map": remote}
    (lab.newest / "config.json").write_text(json.dumps(config))
    lab.train(f"model={lab.newest}", "--name", "y").refused()
    assert not mark.exists()


def payload_everywhere(lab: Lab) -> None:
    """Each file of the newest checkpoint is a pickle that runs, the manifest right, as an attacker would have it."""
    from interlace.observe.checkpoints import write_manifest

    mark = lab.folder / "ran"
    for path in [path for path in lab.newest.rglob("*") if path.is_file()]:
        path.write_bytes(pickle.dumps(Payload(mark)))
    write_manifest(lab.newest)
    assert lab.resume("steps=6").code in (1, 2)
    assert not mark.exists()


def markup_in_a_prompt(lab: Lab) -> None:
    row = json.dumps({"prompt": "<script>alert(1)</script><img src=x>", "answer": "1"})
    lab.train_on(row.encode()).passed()
    lab.cli("report", "x").passed()
    page = (lab.folder / "runs" / "x" / "report.html").read_text()
    assert "<script" not in page and "<img" not in page


def a_pipe_in_shared_memory(lab: Lab) -> None:
    folder = lab.folder / "memory"
    folder.mkdir()
    os.mkfifo(folder / "interlace-x")
    code = "import sys; from pathlib import Path; from interlace.runtime.process.shared import SharedFolder as F; "
    code += "made = F(Path(sys.argv[1])); print(oct(made.path.stat().st_mode & 0o777)); made.remove()"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=REPOSITORY, timeout=60, capture_output=True)
    assert done.returncode == 0 and done.stdout.strip() == b"0o700", done


def a_foreign_kernel(lab: Lab) -> None:
    """A compile cache that others may write to is not loaded; the run goes on with torch's kernels and says so."""
    cache = lab.folder / "cache" / "interlace"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    code = "import interlace.engines.cpu.compiled as c; from pathlib import Path\n"
    code += "try: c.load_library(sorted((Path(c.__file__).parent / 'cpp').glob('*.cpp'))[0])\n"
    code += "except c.KernelsUnavailable as error: print(error)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert "can be written by others" in done.stdout, done
    assert stat.S_IMODE(cache.stat().st_mode) == 0o777 and not any(cache.iterdir())


def a_port_scan_of_a_rank(lab: Lab) -> None:
    from tests.unit.runtime.process.test_admission import Door

    door = Door()
    try:
        door.call(b"half").close()
        door.call()
        door.call(bytes(32))
        assert door.is_open()
    finally:
        door.close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))


def names_of_runs(lab: Lab) -> None:
    for name in ("../../x", ".", "..", "a/b", "/abs", "", "a\nb", "a" * 300):
        Ended.refused(lab.cli("train", "quickstart", "--name", name))
    assert not (lab.folder / "runs").exists() and not (lab.folder.parent.parent / "x").exists()


def reports_of_paths(lab: Lab) -> None:
    lab.cli("report", "../../etc").refused()


def code_that_evaluates(lab: Lab) -> None:
    """Ways in which a file's text could become code are absent from the package."""
    import yaml

    from interlace.core import yaml_text

    assert issubclass(yaml_text._Loader, yaml.SafeLoader)
    unsafe = re.compile(
        r"torch\.load\(|yaml\.(unsafe_)?load\((?!text, _Loader)|shell=True|(?<![\w.])(eval|exec)\("
        r"|read_metadata|all_gather_object"
    )
    agents = REPOSITORY / "interlace" / "agents"
    runners = {agents / "sandbox" / "keeper.py", agents / "code_tests.py"}  # for a policy's code, in the sandbox
    files = [path for path in (REPOSITORY / "interlace").rglob("*.py") if path not in runners]
    found = [
        f"{path.name}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if unsafe.search(line)
    ]
    safe = (".eval()", "weights_only=True")  # torch's loader of tensors executes nothing
    assert not [line for line in found if not any(mark in line for mark in safe)], found


def sandboxed(code: str) -> str:
    """Output of code in a sandbox that keeps the guards of this machine."""
    program = (
        "import asyncio, sys\nfrom interlace.agents.sandbox.client import Sandbox\n"
        "from interlace.agents.sandbox.config import *\n"
    )
    program += "async def main():\n box = await Sandbox.start(SandboxConfig(sandbox='available', timeout_s=5))\n"
    program += " print((await box.run(sys.argv[1])).stdout)\n box.close()\nasyncio.run(main())"
    done = subprocess.run([sys.executable, "-c", program, code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def code_connects_outside(lab: Lab) -> None:
    """Of a unix socket that everybody may use, of vsock, and of the paths of the run."""
    path = lab.folder / "agent"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        code = "import socket\nfor family, address in ((1, PATH), (40, (2, 1))):\n    try:\n        "
        code += "socket.socket(family).connect(address); print('reached')\n    except OSError: pass"
        assert sandboxed(code.replace("PATH", repr(str(path)))) == ""


def code_reads_answers(lab: Lab) -> None:
    answers = lab.folder / "answers.jsonl"
    answers.write_text("{}")
    answers.chmod(0o644)
    assert (
        sandboxed(f"import os; print(os.path.exists({str(answers)!r}), os.path.exists('/etc/shadow'))") == "False False"
    )


def code_gains_privileges(lab: Lab) -> None:
    """A nested user namespace, kernel keys, System V memory, io_uring and userfaultfd."""
    del lab
    code = "import ctypes\nc = ctypes.CDLL(None)\nprint(c.unshare(0x10000000), c.syscall(425, 1, None), "
    code += "c.shmget(0, 4096, 0o1600), c.memfd_create(b'x', 0))"
    assert sandboxed(code) == "-1 -1 -1 -1"


def code_outlives_its_limit(lab: Lab) -> None:
    """A process in another session ends with the sandbox."""
    mark = f"# {lab.folder}"
    program = "import time; time.sleep(600) " + mark
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {program!r}], start_new_session=True)\n"
    assert sandboxed(code + "print('started')") == "started"
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if mark.encode() in command], "a process outlived the sandbox"


def code_holds_memory(lab: Lab) -> None:
    del lab
    assert sandboxed("held = bytearray(16 << 30); print(len(held))") == ""


def a_program_sends_what_overflows(lab: Lab) -> None:
    """A program whose requests set the distribution ends neither its run nor its sample."""
    program = "tests.unit.agents.server.test_requests:sends_what_overflows"
    episode = f"episode={{name: program, function: '{program}', distribution: client}}"
    lab.train(episode, "model=tiny:micro-chat", "steps=1", "warmup=null").passed()
    [file] = (lab.run / "samples").glob("step_*.jsonl")
    events = [json.loads(line)["event"] for line in file.read_bytes().splitlines()]
    assert events and "failed" not in events, events


def a_chat_template_without_end(lab: Lab) -> None:
    for file in lab.newest.glob("manifest.json"):
        file.unlink()  # a model of another program
    (lab.newest / "chat_template.jinja").write_text("{% for a in range(10**9) %}{% endfor %}")
    row = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    start_s = time.monotonic()
    ended = lab.train_on(json.dumps(row).encode() + b"\n", f"model={lab.newest}", "--name", "y")
    ended.refused("template")
    assert time.monotonic() - start_s < LIMIT_S / 2


def a_folder_of_a_run(lab: Lab) -> None:
    """Other users of the machine read nothing in it."""
    lab.train("steps=1", "warmup=null").passed()
    assert lab.run.stat().st_mode & 0o077 == 0


def aliases_that_multiply(lab: Lab) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 10)]
    (lab.folder / "laughs.yaml").write_text("\n".join(levels))
    ended = lab.cli("train", "laughs.yaml")
    ended.refused("aliases expand to more than")
    assert len(ended.text) < 5000


def a_number_of_many_digits(lab: Lab) -> None:
    (lab.folder / "digits.yaml").write_text(f"steps: {'9' * 5000}")
    lab.cli("train", "digits.yaml").refused("cannot be read")


def remote_code_is_off(lab: Lab) -> None:
    from interlace.models.config import ModelConfig

    assert ModelConfig(path="x").trust_remote_code is False


def secrets_in_settings(lab: Lab) -> None:
    lab.train("model.token=hf_x").refused("unknown key")


FAULTS = each(
    [
        ("one local rank listens nowhere", one_rank_listens),
        ("two local ranks listen on loopback", local_ranks_listen),
        ("a port scan of a Ray rank's door", a_port_scan_of_a_rank),
        ("a pickle in every file of a checkpoint", payload_everywhere),
        ("a pickle as a model's weights", payload_in_weights),
        ("code beside a model", code_beside_a_model),
        ("code of a model is off by default", remote_code_is_off),
        ("unsafe loaders in the package", code_that_evaluates),
        ("markup in a prompt reaches the report", markup_in_a_prompt),
        ("a pipe in shared memory", a_pipe_in_shared_memory),
        ("a compile cache that others can write", a_foreign_kernel),
        ("names that lead out of runs/", names_of_runs),
        ("a report of a path outside", reports_of_paths),
        ("a secret in the settings", secrets_in_settings),
        ("sandboxed code connects to sockets outside", code_connects_outside),
        ("sandboxed code reads the answers", code_reads_answers),
        ("sandboxed code gains privileges", code_gains_privileges),
        ("sandboxed code leaves a process", code_outlives_its_limit),
        ("sandboxed code holds 16 GB", code_holds_memory),
        ("a program of a run sends parameters that overflow", a_program_sends_what_overflows),
        ("a chat template without an end", a_chat_template_without_end),
        ("other users and the folder of a run", a_folder_of_a_run),
        ("aliases of YAML that multiply", aliases_that_multiply),
        ("a number of 5,000 digits in YAML", a_number_of_many_digits),
    ],
)
