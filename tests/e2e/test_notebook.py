"""In a notebook with a real kernel, a run has one display with a curve, and an interrupted cell keeps its run."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST = """
import interlace
rows = [{"prompt": f"{n}+1", "answer": str(n + 1)} for n in range(8)]
small = dict(prompts_per_step=2, samples_per_prompt=2, sampling={"max_new_tokens": 4}, cluster={"devices": "cpu:2"},
             rollout={"max_running": 8, "max_tokens": 512}, model="tiny:micro", data=rows)
async def judge(response, answer):
    return float(answer in response)
run = interlace.train(reward=judge, steps=3, name="short", **small)
run
"""
LONG = """
run = interlace.train(reward=lambda response: float(len(response)), steps=100000, name="long", **small)
print("stopped:", run.outcome.was_stopped, "checkpoint:", run.checkpoint.name)
"""
LAST = 'print(len(run.generate(["1+1", "2+1"], max_new_tokens=3)))'


def test_a_notebook_shows_one_display_and_its_interrupted_cell_keeps_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    cells = [nbformat.v4.new_code_cell(text) for text in (FIRST, LONG, LAST)]
    book = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}})

    def interrupt() -> None:
        metrics = tmp_path / "runs" / "long" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            time.sleep(0.1)
        asyncio.run(client.km.interrupt_kernel())

    threading.Thread(target=interrupt, daemon=True).start()
    client.execute()
    shown, long, last = (cell.outputs for cell in book.cells)
    pages = [each["data"]["text/html"] for each in shown if "text/html" in each.get("data", {})]
    assert len(pages) == 2, "one display for all steps, and the run"
    assert "step 3/3" in pages[0] and "<svg" in pages[0]
    assert "<table>" in pages[1] and "3 of 3" in pages[1]
    assert "stopped: True checkpoint: step_" in "".join(each.get("text", "") for each in long)
    assert "2" in "".join(each.get("text", "") for each in last)
