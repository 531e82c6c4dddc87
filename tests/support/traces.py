"""Times and places of all operations of a run, in one string."""

from interlace.runtime.timeline import KeepAll
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.sim_run import Workload, simulate

COSTS = Costs(median_tokens=20, max_tokens=400, train_token=1e-5, optimizer=0.0, sync=0.0)


def of_partials() -> str:
    """Returns the trace of a run in which many partial samples are resumed together."""
    recorder = KeepAll()
    fields = {"placement": {"actor": 0, "rollout": "1-3"}, "on_update": "abort_resume", "rollout_budget": 20}
    simulate(Schedule.parse(fields), Workload(prompts_per_step=8, num_steps=3, costs=COSTS), recorder=recorder)
    return str([(span.group, span.operation, span.start_s, span.end_s) for span in recorder.spans])
