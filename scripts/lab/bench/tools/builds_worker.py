"""One build of Outrider over one bundle: reads a job as a JSON line, runs it, and answers with a JSON line.

It runs as a file, with the PYTHONPATH of the build that it serves, so it imports nothing of ``scripts``. ``LAYOUTS`` is
all that differs between builds. It computes only between a job and its answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Modules of a build that a worker needs.

    Attributes:
        params: class of the sampling parameters.
        params_field: what a request calls them.
    """

    opening: str
    core: str
    sampling: str
    params: str
    params_field: str


LAYOUTS = {
    "flat": Layout(
        opening="runtime.opening", core="runtime.core", sampling="engines.laws",
        params="SamplingLaw", params_field="law",
    ),
    "outrider": Layout(
        opening="outrider.runtime.serving.factory", core="outrider.runtime.core",
        sampling="outrider.engines.sampling.base", params="SamplingParams", params_field="params",
    ),
}  # fmt: skip


class Answer:
    """Tokens of one request, and how it ended; None until then."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: Any = None

    def __call__(self, event: Any) -> None:
        """Take the next event."""
        if hasattr(event, "tokens"):
            self.tokens += [one.token for one in event.tokens]
        else:
            self.end = event


class BuildWorker:
    """A bundle opened as this build's server opens it; steps run in the calling thread."""

    def __init__(self, layout: Layout, options: argparse.Namespace) -> None:
        self._opening = import_module(layout.opening)
        config = import_module(f"{layout.core}.config").ServerConfig(
            max_running=options.max_batch,
            num_threads=options.threads,
            queue_timeout_s=float("inf"),
            default_gamma=None if options.costs else 0,
        )
        serve = self._opening.ServeOptions(costs_folder=options.costs, config=config)
        self._serving = self._opening.load_model(options.bundle, serve)
        self._opening.settle_loaded()
        self._params = import_module(f"{layout.core}.params")
        self._sampling_params = getattr(import_module(layout.sampling), layout.params)
        self._params_field = layout.params_field
        self._num_requests = 0

    def about(self) -> dict[str, Any]:
        """Return the file of the code and the size of the vocabulary."""
        return {
            "file": str(Path(str(self._opening.__file__)).resolve()),
            "vocab_size": self._serving.model.vocab_size,
        }

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer the job's groups one after another; the requests of a group arrive together."""
        answers: list[Answer] = []
        began = time.perf_counter()
        for group in job["groups"]:
            answers += self._answer(group, job, job["seed"] + len(answers))
        seconds = time.perf_counter() - began
        for one in answers:
            if hasattr(one.end, "error"):
                raise RuntimeError("a measured request failed") from one.end.error
        said = json.dumps([one.tokens for one in answers]).encode()
        return {
            "tokens": sum(len(one.tokens) for one in answers),
            "seconds": seconds,
            "answers": hashlib.sha256(said).hexdigest()[:16],
        }

    def _answer(self, group: list[list[int]], job: dict[str, Any], seed: int) -> list[Answer]:
        answers = [Answer() for _ in group]
        worker = self._serving.worker
        for number, (prompt, answer) in enumerate(zip(group, answers, strict=True)):
            self._num_requests += 1
            name = f"builds-{self._num_requests}"
            sampling = {self._params_field: self._sampling_params(temperature=job["temperature"])}
            spec = self._params.RequestSpec(
                internal_id=name, request_id=name, prompt_tokens=tuple(prompt), seed=seed + number,
                max_tokens=job["max_tokens"], speculation=self._speculation(job),
                tenant=job["tenant"], **sampling,
            )  # fmt: skip
            worker.submit(spec, answer)
        while any(one.end is None for one in answers):
            worker.run_step()
        return answers

    def _speculation(self, job: dict[str, Any]) -> Any:
        gamma = job["gamma"]
        if gamma == 0:
            return self._params.SpeculationParams(is_enabled=False)
        if gamma == "auto":
            return self._params.SpeculationParams(drafter=job["drafter"], is_adaptive=True)
        return self._params.SpeculationParams(drafter=job["drafter"], gamma=gamma)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--costs", type=Path, help="folder of step costs; without, none are known")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    # Whatever libraries print goes to stderr: stdout holds answers only.
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        worker = BuildWorker(LAYOUTS[options.layout], options)
        print(json.dumps(worker.about()), file=out)
        for line in sys.stdin:
            print(json.dumps(worker.run(json.loads(line))), file=out)


if __name__ == "__main__":
    main()
