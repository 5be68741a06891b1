"""A job's way of decoding in onnxruntime-genai's configuration; knows nothing of onnxruntime."""

from peer_job import UnableError, refuse_sources, refuse_unless

MOST_ADAPTIVE = 8
"""Draft tokens at most where the library adapts their number."""


def check(job):
    """Refuse what onnxruntime-genai cannot do here."""
    refuse_sources(job)
    refuse_unless(job, "model", "lookup", "chained-lookup")
    if job["drafter"] and job["batch"] > 1:
        raise UnableError("speculative and n-gram decoding take one sequence")


def parts_of(job):
    """The models of the job."""
    return ("target", "draft") if job["drafter"] == "model" else ("target",)


def speculative_block(job):
    """Block ``speculative`` of the configuration; None for plain decoding.

    ``ngram_size`` turns on prompt lookup; chained, it looks up anew behind a continuation that is too short.
    """
    if job["drafter"] is None:
        return None
    block = {"max_draft_tokens": job["gamma"]}
    if job["gamma"] is None:
        block = {"max_draft_tokens": MOST_ADAPTIVE, "min_adaptive_k": 1}
    if job["drafter"] != "model":
        block["ngram_size"] = job["ngram"]
        block["ngram_chained_lookup"] = job["drafter"] == "chained-lookup"
    return block
