"""HumanEval, greedy: how many programs of a bundle pass their tests.

A task's prompt is continued as it stands; the answer ends where the function does, or after 160 tokens. Each program
runs in a process of its own, in an empty folder, with limits of processor time, memory and wall clock. It is code that
a model wrote: run this where that may do harm to nobody. Answers are written when they are there, and a run goes on
where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from outrider import SamplingParams
from outrider.runtime.offline.llm import LLM

BATCH, MAX_TOKENS, LIMIT_S, LIMIT_BYTES = 8, 160, 10, 1 << 30
# What begins behind a function at the left margin; a request stops at eight strings at most, the rest is cut off.
ENDS = [
    "\ndef ",
    "\nclass ",
    "\nif ",
    "\nprint(",
    "\n#",
    "\n@",
    "\nassert ",
    "\nimport ",
    "\nfrom ",
    "\n```",
]


def passes(task: Mapping[str, str], answer: str) -> bool:
    """Return whether a task's program ends without an error within its limits."""
    program = f"{task['prompt']}{answer}\n{task['test']}\ncheck({task['entry_point']})\n"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with tempfile.TemporaryDirectory() as folder:
        try:
            run = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=3 * LIMIT_S,
                preexec_fn=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return run.returncode == 0


def main() -> None:
    """Answer the tasks with each bundle and count those that pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for what is done")
    parser.add_argument("tasks", type=Path, help="HumanEval.jsonl")
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--num-tasks", type=int, default=60)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    tasks = [json.loads(line) for line in options.tasks.read_text().splitlines()]
    tasks = tasks[: options.num_tasks]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop=ENDS[:8])
    for path in options.bundles:
        file = options.work / f"{path.name}.humaneval.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        results = [json.loads(line) for line in lines]
        if len(results) < len(tasks):
            with (
                LLM(path, device="cpu", gamma=0, drafter="lookup", max_running=BATCH) as llm,
                file.open("a") as out,
            ):
                for begin in range(len(results), len(tasks), BATCH):
                    batch = tasks[begin : begin + BATCH]
                    answers = llm.generate([task["prompt"] for task in batch], params)
                    for task, answer in zip(batch, answers, strict=True):
                        text = answer.outputs[0].text
                        for end in ENDS[8:]:
                            text = text.partition(end)[0]
                        result = {
                            "task": task["task_id"],
                            "passes": passes(task, text),
                            "answer": text,
                        }
                        results.append(result)
                        out.write(json.dumps(result) + "\n")
                    out.flush()
        count = sum(result["passes"] for result in results[: len(tasks)])
        print(f"{path.name}: {count} of {len(tasks)} pass", flush=True)


if __name__ == "__main__":
    main()
