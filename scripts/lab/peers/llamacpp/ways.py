"""A job's way of decoding in llama-cpp-python's options; knows nothing of llama.cpp."""

from peer_job import FixedGammaError, UnableError, refuse_sources, refuse_unless

GGML_TYPE_F32 = 0


def check(job):
    """Refuse what llama-cpp-python cannot do here."""
    refuse_sources(job)
    refuse_unless(job, "model", "lookup")
    if job["batch"] > 1:
        raise UnableError("Llama of llama-cpp-python generates one sequence")
    if job["gamma"] is None:
        raise FixedGammaError


def model_options(job):
    """Options of each model; room for a draft behind the last token, and in float32 a cache that is not rounded."""
    options = {
        "n_ctx": len(job["prompts"][0]) + job["max_tokens"] + 32,
        "n_threads": job["threads"],
        "n_threads_batch": job["threads"],
        "verbose": False,
    }
    if job["weights"] == "float32":
        options |= {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}
    return options


def lookup_options(job):
    """Options of the library's own prompt lookup."""
    return {"max_ngram_size": job["ngram"], "num_pred_tokens": job["gamma"]}
