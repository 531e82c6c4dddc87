"""The stages of a flow: what joins workers by one channel of samples, under the schedule's rules.

Each stage's docstring says what it consumes, produces and waits for, and what unblocks it. In the order of the flow:

===============  =================  =======================  =======================  ===========================
stage            consumes           produces                 waits for                unblocked by
===============  =================  =======================  =======================  ===========================
`Admission`      prompts            open rows, tombstones    room in the gate         publication, dropped group
`GenerateStage`  admitted rows      token columns            the pool, the episode    the pool
`EnginePool`     requests           responses                devices, budgets         publication, due group, stall
`MapStage`       rows               a column (reward ...)    a granule, then devices  rows, closed gate, stall
`GroupStage`     rows, tombstones   whole groups             a group's last sample    that sample or its tombstone
`Batches`        complete groups    batches that fill        what the batcher allows  a group, publication
`TrainStage`     a batch            optimizer updates        a granule, then devices  groups, closed batch, stall
`Publisher`      trained steps      versions                 export, swaps            the engines
===============  =================  =======================  =======================  ===========================

`StageFactory` makes them for one run; a flow composes them and never reads the schedule. A *stall* is a moment at which
no operation is out and nothing is timed: the watchdog then asks the stages to let go of what they hold back.
"""
