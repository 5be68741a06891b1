"""A job's way of decoding in Transformers' options; knows neither torch nor Transformers."""

from peer_job import FixedGammaError, UnableError, refuse_unless


def check(job):
    """Refuse what Transformers cannot do here."""
    if job["weights"] != "float32":
        raise UnableError("torch on the CPU has no weights in blocks")
    refuse_unless(job, "model", "lookup")
    if job["drafter"] and job["batch"] > 1:
        raise UnableError("assisted generation takes one sequence")
    if job["drafter"] == "lookup" and job["gamma"] is None:
        raise FixedGammaError


def generate_options(job):
    """Options of ``generate``, but for the draft model."""
    options = {"max_new_tokens": job["max_tokens"], "do_sample": False, "pad_token_id": 0}
    if job["reads_source"]:
        # The end is banned, as CTranslate2 does it: behind their end such models have nothing to say.
        options["min_new_tokens"] = job["max_tokens"]
    if job["drafter"] == "lookup":
        options["prompt_lookup_num_tokens"] = job["gamma"]
        options["max_matching_ngram_size"] = job["ngram"]
    return options


def assistant_settings(job):
    """Fields of the draft model's generation configuration: gamma tokens each time, however sure it is.

    Left to itself, it drafts until it is unsure.
    """
    if job["gamma"] is None:
        return {}
    return {
        "num_assistant_tokens": job["gamma"],
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
