"""A job's way of decoding in OpenVINO GenAI's options; knows nothing of OpenVINO."""

from peer_job import FixedGammaError, refuse_sources, refuse_unless

CONFIDENCE = 0.4
"""Of the draft model, below which it stops, as in OpenVINO GenAI's own samples."""
WEIGHT_FORMATS = {"float32": "fp32", "int8": "int8", "int4": "int4"}


def check(job):
    """Refuse what OpenVINO GenAI cannot do here."""
    refuse_sources(job)
    refuse_unless(job, "model", "lookup")
    if job["drafter"] == "lookup" and job["gamma"] is None:
        raise FixedGammaError


def device_options(job):
    """Options of each model: our threads, and in float32 nothing that is rounded further."""
    options = {"INFERENCE_NUM_THREADS": job["threads"]}
    if job["weights"] == "float32":
        options |= {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
    return options


def pipeline_options(job):
    """Options of the pipeline, but for the draft model."""
    return {"prompt_lookup": True} if job["drafter"] == "lookup" else {}


def generation_settings(job):
    """Fields of the generation configuration; no token ends an answer."""
    settings = {"max_new_tokens": job["max_tokens"], "ignore_eos": True, "do_sample": False}
    if job["drafter"] and job["gamma"] is None:
        settings["assistant_confidence_threshold"] = CONFIDENCE
    elif job["drafter"]:
        settings["num_assistant_tokens"] = job["gamma"]
    if job["drafter"] == "lookup":
        settings["max_ngram_size"] = job["ngram"]
    return settings
