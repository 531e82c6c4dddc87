"""Rows and settings of the smallest runs of `interlace.train`."""

from interlace.run.library import Settings

ROWS = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(6)]
TINY: Settings = {
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "sampling": {"max_new_tokens": 4},
    "cluster": {"devices": "cpu:2"},
    "rollout": {"max_running": 8, "max_tokens": 512},
}
