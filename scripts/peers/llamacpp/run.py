"""llama.cpp through llama-cpp-python, plain and with a draft model."""

from itertools import islice

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from peer_job import UnableError, converted, main
from to_gguf import convert

GGML_TYPE_F32 = 0


def load(job):
    if job["batch"] > 1:
        raise UnableError("Llama of llama-cpp-python generates one sequence")
    draft = Draft(open_model(job, "draft"), job["gamma"]) if job["gamma"] else None
    target = open_model(job, "target", draft_model=draft)
    return lambda prompts: [greedy(target, prompt, job["max_tokens"]) for prompt in prompts]


def open_model(job, part, **options):
    folder = converted(job, part, lambda source, out: convert(source, out, job["weights"]))
    cache = (
        {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32} if job["weights"] == "float32" else {}
    )
    return llama_cpp.Llama(
        str(folder / "model.gguf"), n_ctx=len(job["prompts"][0]) + job["max_tokens"] + 32, n_threads=job["threads"],
        n_threads_batch=job["threads"], verbose=False, **cache, **options,
    )  # fmt: skip


def greedy(model, prompt, num_tokens):
    """Greedy tokens; what was computed of a shared beginning is kept."""
    return [int(token) for token in islice(model.generate(list(prompt), temp=0.0), num_tokens)]


class Draft(LlamaDraftModel):
    """The library's own interface of a drafter, with a model behind it."""

    def __init__(self, model, gamma):
        self.model, self.gamma = model, gamma

    def __call__(self, input_ids, /, **options):
        """Token ids that may follow."""
        return np.array(greedy(self.model, input_ids.tolist(), self.gamma), dtype=np.intc)


if __name__ == "__main__":
    main(load)
