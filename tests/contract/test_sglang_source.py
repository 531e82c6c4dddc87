"""The source of SGLang, which needs a GPU for its import, has the routes and fields that the adapter uses."""

import ast
import inspect
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from interlace.core.types import NO_GROUP, Request, SampleKey, SamplingParams
from interlace.engines.rollout.kinds.sglang import SGLangKind
from interlace.engines.rollout.services.dialects import sglang as dialect
from tests.support.sglang_server import StandIn

pytestmark = pytest.mark.slow  # downloads 39 MB
VERSION = "0.5.23"
PARTS = ("device", "exec_", "memory", "model", "parallel", "schedule", "serving")
"""Of SGLang's settings, those with what the adapter sets."""
OWN_STOP, OTHER_STOP, PLAIN = 2, 9, 30


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Reads a file of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, f"sglang=={VERSION}"], capture_output=True, text=True, timeout=300, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"sglang {VERSION} cannot be downloaded: {done.stderr.strip()[-200:]}")

    def read(path: str) -> str:
        with zipfile.ZipFile(wheels[0]) as held:
            return held.read(f"sglang/srt/{path}").decode()

    return read


def find(source: str, name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return next(node for node in nodes if node.name == name)


def annotated(source: str, name: str) -> set[str]:
    """The fields of a class, its bases left out."""
    body = find(source, name).body
    return {one.target.id for one in body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}


def sampling(*stops: int) -> dict[str, object]:
    params = SamplingParams(max_new_tokens=8, stop_token_ids=stops)
    asked = Request(uid="a", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1], params=params)
    return dialect.write_sampling(asked, 0, frozenset({OWN_STOP}))


def ends(package: Callable[[str], str], sent: dict[str, object], token: int) -> bool:
    """Whether SGLang's own check ends a response at a token, for what the adapter sends."""
    code = find(package("managers/schedule_batch.py"), "_check_token_based_finish")
    code.decorator_list = []
    names: dict[str, Any] = {"List": list, "FINISH_MATCHED_TOKEN": lambda matched: matched}
    exec(compile(ast.Module(body=[code], type_ignores=[]), "schedule_batch.py", "exec"), names)
    stops = sent["stop_token_ids"]
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(
            ignore_eos=sent["ignore_eos"],
            stop_token_ids=set(stops) if isinstance(stops, list) else None,
        ),
        eos_token_ids={OWN_STOP},
        tokenizer=SimpleNamespace(eos_token_id=OWN_STOP, additional_stop_token_ids=None),
        output_ids=[PLAIN, token],
        finished_reason=None,
        finished_len=None,
    )
    ended = bool(names[code.name](request, [token]))
    assert not ended or request.finished_len == 2, "the stop token is kept"
    return ended


def test_a_stop_token_ends_a_response(package: Callable[[str], str]) -> None:
    sent = sampling(OWN_STOP, OTHER_STOP)
    assert [ends(package, sent, token) for token in (OWN_STOP, OTHER_STOP, PLAIN)] == [True, True, False]


def test_nothing_ends_a_response_that_names_no_stop(package: Callable[[str], str]) -> None:
    assert not any(ends(package, sampling(), token) for token in (OWN_STOP, OTHER_STOP, PLAIN))


def test_stops_beside_which_sglang_would_heed_others_are_why_some_requests_are_refused(
    package: Callable[[str], str],
) -> None:
    assert ends(package, {"stop_token_ids": [OTHER_STOP], "ignore_eos": False}, OWN_STOP)
    with pytest.raises(dialect.UserError, match="own end tokens"):
        sampling(OTHER_STOP)


def test_each_name_that_is_sent_is_one_of_sglangs(package: Callable[[str], str]) -> None:
    assert set(sampling(OWN_STOP)) <= annotated(package("sampling/sampling_params.py"), "SamplingParams")


def test_log_probs_are_from_before_truncation(package: Callable[[str], str]) -> None:
    """They are of all probabilities, which are drawn from by another function that cuts and hands none back."""
    forward = next(
        node
        for node in ast.walk(find(package("layers/sampler.py"), "Sampler"))
        if isinstance(node, ast.FunctionDef) and node.name == "forward"
    )
    text = ast.unparse(forward)
    made = text.index("logprobs_via_logsoftmax_kernel = torch.nn.functional.log_softmax(logits, dim=-1)")
    assert made < text.index("self._sample_from_probs(")
    assert "batch_next_token_ids, sampling_mask_capture = self._sample_from_probs(" in text


def test_each_flag_of_the_server_is_one_of_sglangs(package: Callable[[str], str]) -> None:
    fields = (node for part in PARTS for node in ast.walk(ast.parse(package(f"arg_groups/fields/{part}.py"))))
    known = {ast.unparse(node.target) for node in fields if isinstance(node, ast.AnnAssign)}
    flags = re.findall(r'"--([a-z-]+)"', inspect.getsource(SGLangKind.command))
    assert len(flags) > 10
    unknown = {flag.replace("-", "_") for flag in flags} - known
    assert not unknown


def test_each_route_that_is_called_is_one_of_sglangs(package: Callable[[str], str]) -> None:
    served = package("entrypoints/http_server.py")
    routes = set(re.findall(r'(?:get|post)\(\s*f?"(/[a-z_]+)', inspect.getsource(dialect) + inspect.getsource(StandIn)))
    assert len(routes) >= 11
    assert not {route for route in routes if f'"{route}"' not in served}


def test_a_health_check_generates_a_token_and_the_route_that_is_called_instead_does_not(
    package: Callable[[str], str],
) -> None:
    """A server that is paused, or without its memory, generates none."""
    served = package("entrypoints/http_server.py")
    assert "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION = EnvBool(True)" in package("environ.py")
    decorators = [ast.unparse(each) for each in find(served, "health_generate").decorator_list]
    assert "app.get('/health')" in decorators
    body = ast.unparse(find(served, "ready"))
    assert "is_ready()" in body and "generate" not in body


def test_a_paused_scheduler_ends_no_request(package: Callable[[str], str]) -> None:
    """Its loop then only receives messages; so a run continues it before it ends the requests of another run."""
    code = find(package("managers/scheduler.py"), "event_loop_normal")
    text = ast.unparse(code)
    assert text.index("if self._engine_paused:") < text.index("continue") < text.index("self.run_batch(batch)")
    paused = ast.unparse(find(package("managers/tokenizer_manager.py"), "pause_generation"))
    assert "is_locked()" in paused, "an abort waits for the ends of all requests"


def test_each_field_of_a_message_is_one_of_sglangs(package: Callable[[str], str]) -> None:
    source = package("managers/io_struct.py")
    known = annotated(source, "GenerateReqInput") | annotated(source, "UpdateWeightFromDiskReqInput")
    sent = {"rid", "input_ids", "sampling_params", "return_logprob", "stream", "extra_key", "logprob_start_len"}
    sent |= {"model_path", "weight_version", "flush_cache", "abort_all_requests", "keep_pause"}
    assert sent <= known, sent - known
