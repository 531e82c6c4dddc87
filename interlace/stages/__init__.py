"""The stages of a flow. One channel of samples joins them and the workers, under the rules of the schedule.

The docstring of each stage has four lines: Consumes, Produces, Waits for, Released by. In the order of the flow:

===============  =================  =======================  =======================  ===========================
stage            consumes           produces                 waits for                released by
===============  =================  =======================  =======================  ===========================
`Admission`      prompts            open rows, tombstones    room in the gate         publication, dropped group
`GenerateStage`  admitted rows      token columns            the pool, the episode    responses, the episode's end
`EnginePool`     requests           responses                devices, budgets         publication, due group, stall
`MapStage`       rows               a column (reward ...)    a granule, then devices  rows, closed gate, stall
`GroupStage`     rows, tombstones   whole groups             a group's last sample    that sample or its tombstone
`Batches`        complete groups    batches that fill        the batcher's rules      a group, publication
`TrainStage`     a batch            optimizer updates        a granule, then devices  groups, closed batch, stall
`Publisher`      trained steps      versions                 export, swaps            the engines
===============  =================  =======================  =======================  ===========================

`GenerateStage` and `EnginePool` are in `interlace.rollouts`. `StageFactory` creates the stages of one run. A flow
composes them and never reads the schedule. In a *stall* no operation runs and no timer is pending, so nothing can make
progress: the watchdog then makes the stages release the rows that they hold back.
"""
