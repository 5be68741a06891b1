"""A job's way of decoding in CTranslate2's options; knows nothing of CTranslate2."""

from peer_job import UnableError, refuse_unless

QUANTIZATIONS = {"float32": "float32", "int8": "int8"}


def check(job):
    """Refuse what CTranslate2 cannot do here."""
    if not job["reads_source"]:
        raise UnableError("is asked for encoder-decoder models only")
    refuse_unless(job)


def translator_options(job):
    """Options of the translator: our threads, all on one batch."""
    return {
        "device": "cpu",
        "compute_type": QUANTIZATIONS[job["weights"]],
        "inter_threads": 1,
        "intra_threads": job["threads"],
    }


def decoding_options(job):
    """Options of a batch: greedy, the end token banned until the answer is as long as wanted, nothing cut."""
    return {
        "beam_size": 1,
        "max_batch_size": 0,
        "max_input_length": 0,
        "min_decoding_length": job["max_tokens"],
        "max_decoding_length": job["max_tokens"],
    }
