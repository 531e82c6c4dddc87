"""Engines as services: the cost of an address, and two servers against one.

- `address`: one server process at an address against the same engine in this process. `p50` is the median time of one
  request of one token, sent alone; `tokens/s` is measured with concurrent requests. Both alternate, so a ratio compares
  neighbours in time; the median over the rounds is printed with the range.
- `servers`: tokens/s of two servers against one, with the same total of requests.
- `update`: seconds of a call that loads a new version into an idle server: from a folder in shared memory, which this
  process writes first, and from the trainer's shared memory by a manifest. Generation stands still for a part of them.
- `delay`: seconds by which a running request of `--pause-tokens` tokens ends later if the server loads a version
  meanwhile (`on_update: keep`), against the request just before it.

    python benchmarks/engines.py [--model tiny:mini] [--requests 64] [--tokens 64] [--pause-tokens 64] [--rounds 5]
                                 [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from interlace.core.types import NO_GROUP, Request, SampleKey, SamplingParams
from interlace.engines.rollout.kinds import EngineSite, create_kind, engine_kind
from interlace.engines.rollout.protocol import RolloutEngine, ServiceEngineProtocol
from interlace.engines.train.export import list_named_weights
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.weights.config import WeightsConfig
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Route, WeightRef
from interlace.weights.writer import WeightWriter


def make_engine(name: str, model: ModelConfig, instance: int = 0) -> RolloutEngine:
    """Creates an engine of a kind."""
    kind = create_kind(engine_kind(name).Config.parse({"engine": name, "max_running": 64, "max_tokens": 65536}))
    site = EngineSite(model=model, devices=("cpu",), seed=0, num_threads=1, instance=instance)
    return kind.create(load_model(model), site)


def make_requests(count: int, tokens: int, first: int = 0) -> list[Request]:
    """Returns requests of one prompt."""
    params = SamplingParams(max_new_tokens=tokens)
    return [
        Request(uid="benchmark", owner=SampleKey(NO_GROUP, first + number), prompt_ids=[5, 6, 7, 8], params=params)
        for number in range(count)
    ]


def drain(
    engines: Sequence[RolloutEngine], requests: Sequence[Request], load: Callable[[], None] | None = None
) -> float:
    """Serves requests, distributed round-robin over the engines, and calls `load` meanwhile. Returns the seconds."""
    start_s = time.perf_counter()
    left = [0] * len(engines)
    for number, request in enumerate(requests):
        engines[number % len(engines)].submit(request)
        left[number % len(engines)] += 1
    for engine in engines if load is not None or len(engines) > 1 else ():
        engine.interrupt()
        engine.step()  # every server gets its requests before the first wait
    if load is not None:
        load()
    for place, engine in enumerate(engines):
        while left[place] > 0:
            output = engine.step()
            left[place] -= len(output.finished)
            if not output.num_running + output.num_waiting:
                break
    return time.perf_counter() - start_s


def time_updates(
    server: RolloutEngine, state: Mapping[str, Tensor], version: int, writer: WeightWriter, reader: WeightReader
) -> dict[str, float]:
    """Loads two versions of the same weights. Returns the seconds of each load by its way to the server."""
    assert isinstance(server, ServiceEngineProtocol)
    start_s = time.perf_counter()
    server.update_weights(state, version, "recompute")
    folder_s = time.perf_counter() - start_s
    ref = WeightRef(version=version + 1, parts=(writer.write(version + 1, state),))
    start_s = time.perf_counter()
    server.pull_weights(ref, "recompute", reader)
    return {"folder": folder_s, "manifest": time.perf_counter() - start_s}


def time_delays(
    server: RolloutEngine,
    state: Mapping[str, Tensor],
    version: int,
    writer: WeightWriter,
    reader: WeightReader,
    tokens: int,
) -> dict[str, float]:
    """Loads two versions while a request runs. Returns the seconds that each load adds to it, by its way."""
    assert isinstance(server, ServiceEngineProtocol)
    ref = WeightRef(version=version + 1, parts=(writer.write(version + 1, state),))

    def load_folder() -> None:
        server.update_weights(state, version, "keep")

    def load_manifest() -> None:
        server.pull_weights(ref, "keep", reader)

    delays = {}
    for name, load in (("folder", load_folder), ("manifest", load_manifest)):
        plain_s = drain([server], make_requests(1, tokens))
        delays[name] = drain([server], make_requests(1, tokens), load) - plain_s
    return delays


def summarize(values: Sequence[float], digits: int) -> str:
    """Returns the median and the range as text."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> str:
    """Returns the median ratio and the range as text."""
    found = [one / other for one, other in zip(numerators, denominators, strict=True)]
    return summarize(found, 2)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny:mini")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pause-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = ModelConfig(path=options.model)
    native = make_engine("native", model)
    servers = [make_engine("interlace", model, number) for number in range(2)]
    single: dict[str, list[float]] = {"native": [], "address": []}
    times: dict[str, list[float]] = {"native": [], "address": [], "two": []}
    update: dict[str, list[float]] = {"folder": [], "manifest": []}
    delay: dict[str, list[float]] = {"folder": [], "manifest": []}
    route = Route(transport="shared_memory", config=WeightsConfig(transport="shared_memory"))
    writer, reader = WeightWriter(route), WeightReader()
    state = dict(list_named_weights(load_model(model.model_copy(update={"seed": 1})).model))  # as a trainer sends them
    try:
        for engine in (native, *servers):
            drain([engine], make_requests(4, 4))
        for number in range(options.rounds):
            requests = make_requests(options.requests, options.tokens)
            times["native"].append(drain([native], requests))
            times["address"].append(drain(servers[:1], requests))
            times["two"].append(drain(servers, requests))
            for name, engine in (("native", native), ("address", servers[0])):
                each = [drain([engine], make_requests(1, 1, first=place)) for place in range(40)]
                single[name].append(statistics.median(each))
            for name, seconds in time_updates(servers[0], state, 4 * number + 1, writer, reader).items():
                update[name].append(seconds)
            found = time_delays(servers[0], state, 4 * number + 3, writer, reader, options.pause_tokens)
            for name, seconds in found.items():
                delay[name].append(seconds)
    finally:
        reader.close()
        writer.close()
        for server in servers:
            if isinstance(server, ServiceEngineProtocol):
                server.close()
    total = options.requests * options.tokens
    added_ms = [1e3 * (one - other) for one, other in zip(single["address"], single["native"], strict=True)]
    rows = {
        "p50 of one request, added by the address (ms)": summarize(added_ms, 2),
        "tokens/s, address / native": ratios(times["native"], times["address"]),
        "tokens/s, two servers / one": ratios(times["address"], times["two"]),
        "tokens/s, native": f"{total / statistics.median(times['native']):.0f}",
        **{f"update by a {name} in shared memory (s)": summarize(each, 3) for name, each in update.items()},
        **{f"delay of a request by a {name} (s)": summarize(each, 3) for name, each in delay.items()},
    }
    print(f"{options.model}, {options.requests} requests of {options.tokens} tokens, {options.rounds} rounds\n")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
