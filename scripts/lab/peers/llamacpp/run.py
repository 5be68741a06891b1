"""llama.cpp through llama-cpp-python, plain, with a draft model, and with prompt lookup."""

from itertools import islice

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from peer_job import converted, main
from to_gguf import convert
from ways import check, lookup_options, model_options


def load(job):
    check(job)
    target = open_model(job, "target", draft_model=drafter_of(job))
    return lambda prompts: [greedy(target, prompt, job["max_tokens"]) for prompt in prompts]


def drafter_of(job):
    if job["drafter"] is None:
        return None
    if job["drafter"] == "lookup":
        return LlamaPromptLookupDecoding(**lookup_options(job))
    return Draft(open_model(job, "draft"), job["gamma"])


def open_model(job, part, **options):
    folder = converted(job, part, lambda source, out: convert(source, out, job["weights"]))
    return llama_cpp.Llama(str(folder / "model.gguf"), **model_options(job), **options)


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
