"""Transformers' generate, assisted by a draft model or by prompt lookup."""

import torch
from peer_job import main
from transformers import AutoModelForCausalLM
from ways import assistant_settings, check, generate_options


def load(job):
    check(job)
    torch.set_num_threads(job["threads"])
    options = generate_options(job)
    target = open_model(job["target"])
    if job["drafter"] == "model":
        draft = open_model(job["draft"])
        for name, value in assistant_settings(job).items():
            setattr(draft.generation_config, name, value)
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
