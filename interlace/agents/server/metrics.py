"""Counters of the server, in the format of Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)


class ServerMetrics:
    """Counters since the server's start."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        self.prompt_tokens = self.drawn_tokens = self.retries = self.running = self.sessions = 0

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._requests[route, status] += 1
        self._seconds[route] = self._seconds.get(route, 0.0) + seconds
        self._buckets.setdefault(route, [0] * (len(_BOUNDS_S) + 1))[bisect_left(_BOUNDS_S, seconds)] += 1

    def text(self) -> str:
        return "\n".join(self._list_lines()) + "\n"

    def _list_lines(self) -> Iterator[str]:
        yield "# TYPE interlace_requests_total counter"
        for (route, status), count in sorted(self._requests.items()):
            yield f'interlace_requests_total{{route="{route}",status="{status}"}} {count}'
        yield "# TYPE interlace_request_seconds histogram"
        for route, buckets in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), buckets, strict=True):
                total += count
                yield f'interlace_request_seconds_bucket{{route="{route}",le="{bound}"}} {total}'
            yield f'interlace_request_seconds_sum{{route="{route}"}} {self._seconds[route]:.6f}'
            yield f'interlace_request_seconds_count{{route="{route}"}} {total}'
        for name in ("prompt_tokens", "drawn_tokens", "retries"):
            yield f"# TYPE interlace_{name}_total counter"
            yield f"interlace_{name}_total {getattr(self, name)}"
        for name in ("running", "sessions"):
            yield f"# TYPE interlace_{name} gauge"
            yield f"interlace_{name} {getattr(self, name)}"
