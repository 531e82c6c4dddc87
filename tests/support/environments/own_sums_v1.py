"""A taskset of `verifiers` 0.4, written from its documentation: sums, scored by the last message."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.reward
    async def readable(self, trace: vf.Trace) -> float:
        if trace.last_reply == "unreadable":
            raise ValueError("no number")
        return 0.0

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(3):
            data = SumData(prompt=f"{number}+{number}", answer=str(2 * number))
            yield SumTask(data, self.config.task)
