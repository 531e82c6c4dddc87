"""Phase of a run at the moment of a fault, from the operations that run."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from interlace.runtime.cluster import Cluster
from interlace.runtime.timeline import Span

Phase = Literal[
    "prefill", "decode", "scoring", "simulation", "update", "publication", "checkpoint", "evaluation", "idle"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
PREFILL_S = 0.02
"""Seconds after an engine got new prompts that count as prefill, because a call does not report when it decodes."""
_BY_BIN: dict[str | None, Phase] = {
    "score": "scoring",
    "inference": "scoring",
    "simulate": "simulation",
    "train": "update",
    "weight_sync": "publication",
}
_BY_OPERATION: dict[str, Phase] = {
    "copy_checkpoint": "checkpoint",
    "write_checkpoint": "checkpoint",
    "write": "checkpoint",
    "simulate_beside": "simulation",
}


class RunPhases:
    """The phases of a run, as another thread sees them."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._is_evaluating = False

    def follow(self, cluster: Cluster) -> None:
        """Reads the operations of a cluster from now on. Called when the run starts, and starts again."""
        self._cluster, self._is_evaluating = cluster, False

    def note_stage(self, name: str, *, is_done: bool) -> None:
        """Takes note of work outside the steps, by its name in the progress of a run."""
        if name.startswith("evaluation"):
            self._is_evaluating = not is_done

    def list_phases(self, group: str) -> Sequence[Phase]:
        """Returns the phases that run now: first of the group, then of the rest of the run.

        group: `role/instance`, or `role` for all groups of a role. An evaluation comes first, because it uses the same
        operations. `idle` if no operation runs.
        """
        cluster = self._cluster
        if cluster is None:
            return ("idle",)
        spans = cluster.timeline.running
        own = [span for span in spans if group in (span.group, span.role)]
        found: list[Phase] = ["evaluation"] if self._is_evaluating else []
        return [*dict.fromkeys([*found, *_name_phases(cluster, own), *_name_phases(cluster, spans)])] or ("idle",)

    def find_group(self, process: int) -> str:
        """Returns the group of a rank with a process on this machine. Empty for another process."""
        ranks = [*self._cluster.processes] if self._cluster else []
        return next((rank.name.partition("[")[0] for rank in ranks if rank.process_here == process), "")


def _name_phases(cluster: Cluster, spans: Iterable[Span]) -> Sequence[Phase]:
    """Returns the phases of operations, those that are rare first."""
    found = {phase for span in spans if (phase := _name_phase(cluster, span))}
    return [phase for phase in reversed(PHASES) if phase in found]


def _name_phase(cluster: Cluster, span: Span) -> Phase | None:
    if span.bin == "generate":
        began_s = cluster.timeline.prompts_s.get(span.group, 0.0)
        return "prefill" if cluster.clock.now() - began_s < PREFILL_S else "decode"
    return _BY_OPERATION.get(span.operation) or _BY_BIN.get(span.bin)
