"""Data files: invalid rows are named, all other rows are used."""

import json
from collections.abc import Callable

from tests.faults.lab import Fault, Lab

ROW = {"prompt": "1+1=", "answer": "2"}


def line(**changes: object) -> bytes:
    return json.dumps({**ROW, **changes}).encode() + b"\n"


def refused(content: bytes, *sentences: str) -> Callable[[Lab], None]:
    return lambda lab: lab.train_on(content).refused(*sentences)


def trained(content: bytes) -> Callable[[Lab], None]:
    return lambda lab: lab.train_on(content).passed()


CASES: dict[str, Callable[[Lab], None]] = {
    "no rows": refused(b"", "data.jsonl"),
    "blank lines alone": refused(b"\n\n  \n", "data.jsonl"),
    "an empty prompt": refused(line(prompt=""), "data.jsonl"),
    "all prompts empty": refused(line(prompt="") * 3, "data.jsonl"),
    "a prompt of 100,000 tokens": refused(line(prompt="1" * 100_000), "tokens"),
    "binary": refused(bytes(range(256)) * 8, "data.jsonl"),
    "not UTF-8": refused(b'{"prompt": "\xff\xfe", "answer": "2"}\n', "data.jsonl"),
    "UTF-16": refused('{"prompt": "1", "answer": "2"}\n'.encode("utf-16"), "data.jsonl"),
    "a number as prompt": refused(line(prompt=5), "data.jsonl"),
    "a list as a line": refused(b"[1, 2]\n", "data.jsonl:1"),
    "no answer": refused(b'{"prompt": "1"}\n', "data.jsonl"),
    "null as answer": refused(line(answer=None), "data.jsonl"),
    "NaN as answer": refused(b'{"prompt": "1", "answer": NaN}\n', "data.jsonl"),
    "half a surrogate": refused(b'{"prompt": "\\ud800", "answer": "2"}\n', "data.jsonl"),
    "an integer of 5,000 digits": refused(b'{"prompt": "1", "answer": "2", "n": ' + b"9" * 5000 + b"}\n", "data.jsonl"),
    "200,000 nested brackets": refused(b'{"prompt": ' + b"[" * 200_000 + b"\n", "data.jsonl"),
    "a file that is missing": lambda lab: lab.train_on(line(), "task.files.train=gone.jsonl").refused("gone.jsonl"),
    "no answer, but a usual name": refused(b'{"prompt": "1", "solution": "2"}\n', "task.columns.answer=solution"),
    "rows of demonstrations": refused(b'{"prompt": "1", "completion": "2"}\n', "interlace train sft"),
    "preference pairs": refused(b'{"prompt": "1", "chosen": "2", "rejected": "3"}\n', "interlace train dpo"),
    "a picture in a chat": refused(line(prompt=[{"role": "user", "content": [{"type": "image"}]}]), "'image'"),
    "tools without a chat template": refused(line(tools=[{"name": "f"}]), "has tools", "task.columns.tools=null"),
    "NaN in another column": refused(b'{"prompt": "1", "answer": "2", "x": NaN}\n', "data.jsonl:1", "column 'x'"),
    "a column that is missing": lambda lab: lab.train_on(line(), "task.columns.answer=a.b").refused(
        "no column 'a.b'", "prompt, answer"
    ),
    "all prompts too long": lambda lab: lab.train_on(line(), "task.max_prompt_tokens=2", "task.overlong=drop").refused(
        "were dropped"
    ),
    "an unknown sampler": lambda lab: lab.train_on(line(), "task.sampler=shufle").refused("'shuffle'"),
    "a hub name without network": lambda lab: lab.train_on(line(), "task=owner/name").refused("owner/name"),
    "a byte order mark": trained(b"\xef\xbb\xbf" + line()),
    "duplicates": trained(line() * 4),
    "a line of 50 MB": trained(line(note="x" * 50_000_000)),
    "one row": trained(line()),
    "HTML": trained(line(prompt="<b>1</b>", answer="<i>2</i>")),
}
FAULTS = [Fault(name=name, check=check) for name, check in CASES.items()]
