"""Transformers' generate and assisted generation."""

import torch
from peer_job import UnableError, main
from transformers import AutoModelForCausalLM


def load(job):
    if job["weights"] != "float32":
        raise UnableError("torch on the CPU has no weights in blocks")
    if job["gamma"] and job["batch"] > 1:
        raise UnableError("assisted generation takes one sequence")
    torch.set_num_threads(job["threads"])
    options = {"max_new_tokens": job["max_tokens"], "do_sample": False, "pad_token_id": 0}
    target = open_model(job["target"])
    if job["gamma"]:
        draft = open_model(job["draft"])
        draft.generation_config.num_assistant_tokens = job["gamma"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = draft

    def run(prompts):
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            made = target.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        return made[:, tokens.shape[1] :].tolist()

    return run


def open_model(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


if __name__ == "__main__":
    main(load)
