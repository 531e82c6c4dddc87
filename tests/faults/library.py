"""Mistakes of a program: each call of the Python API refuses them in one sentence, and leaves no run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from tests.faults.lab import REPOSITORY, Fault, Lab

SCRIPT = """
import json, sys
import interlace
rows = [{"prompt": f"{n}+1", "answer": str(n + 1)} for n in range(4)]
small = dict(steps=1, prompts_per_step=1, samples_per_prompt=2, sampling={"max_new_tokens": 4}, quiet=True,
             cluster={"devices": "cpu:1"}, rollout={"max_running": 8, "max_tokens": 512})
def train(**changed):
    return interlace.train(**{**dict(model="tiny:micro", data=rows, reward=lambda response: 1.0), **small, **changed})
for call in json.loads(sys.argv[1]):
    try:
        eval(call)
        print("NOT REFUSED")
    except interlace.UserError as error:
        print(" ".join(str(error).split()))
"""


def refuses(calls: Sequence[tuple[str, str]]) -> Callable[[Lab], None]:
    """Makes all calls in one process, which imports torch once."""

    def check(lab: Lab) -> None:
        command = [sys.executable, "-c", SCRIPT, json.dumps([call for call, _ in calls])]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, cwd=lab.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-600:]
        for (call, sentence), line in zip(calls, done.stdout.splitlines(), strict=True):
            assert sentence in line, f"{call}: {line}"
        runs = lab.folder / "runs"
        assert not runs.exists() or {path.name for path in runs.iterdir()} <= {"data"}, "a run was left"

    return check


CALLS = [
    ("train(reward=lambda response, levl: 1.0)", "data[0] has no 'levl', which reward"),
    ("train(reward=lambda completions, trainer_state: [1.0])", "which only TRL's trainer passes"),
    ("train(reward=lambda response, completions: 1.0)", "which is one response's"),
    ("train(reward=lambda response: '1.0')", "the reward function returned '1.0', which is not a number"),
    ("train(reward=lambda response: None)", "the reward function returned None, which is not a number"),
    ("train(reward=3)", "reward is of type int"),
    ("train(reward='exact', data=[{'prompt': 'a', 'solution': 'b'}])", "data[0] has no 'answer'"),
    ("train(data=[{'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}])", "interlace train dpo"),
    ("train(data=[{'prompt': 'a', 'completion': 'b'}])", "interlace train sft"),
    ("train(data=[{'question': 'a'}])", "data[0] has no column 'prompt'"),
    ("train(data=rows, columns={'answer': 'reward_model.ground_truth'})", "has no column 'reward_model.ground_truth'"),
    ("train(model=3)", "model is of type int"),
    ("train(resume=True)", "to resume. Start it without resume=True"),
    ("train(resume=True, overwrite=True)", "resume=True continues a run"),
    ("interlace.train('quickstat')", "quickstart"),
    ("interlace.train(steps=3)", "needs model and data"),
    ("interlace.load_run('nothing')", "'nothing' is not a run"),
    ("interlace.evaluate('nothing')", "is no run"),
    ("interlace.simulate('quickstart')", "profile=... is missing"),
    ("interlace.plan('quickstart', devices=4, probe=True)", "probe=True runs plans on this machine"),
    ("interlace.profile('quickstart', budget=0)", "budget=0"),
    ("interlace.serve('x', api_key='a', admin_key='a')", "are the same"),
]

OF_TRAIN = [pair for pair in CALLS if "train(" in pair[0]]
FAULTS = [
    Fault(name="mistakes of train()", check=refuses(OF_TRAIN)),
    Fault(name="mistakes of the other functions", check=refuses([pair for pair in CALLS if pair not in OF_TRAIN])),
]
