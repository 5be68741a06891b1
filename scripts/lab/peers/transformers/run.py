"""Transformers' generate, assisted by a draft model or by prompt lookup."""

import torch
from peer_job import main
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from ways import assistant_settings, check, generate_options


def load(job):
    check(job)
    torch.set_num_threads(job["threads"])
    options = generate_options(job)
    target = open_model(job, "target")
    if job["drafter"] == "model":
        draft = open_model(job, "draft")
        for name, value in assistant_settings(job).items():
            setattr(draft.generation_config, name, value)
        options["assistant_model"] = draft

    def run(prompts):
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            made = target.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        prefix = 1 if job["reads_source"] else tokens.shape[1]
        return made[:, prefix:].tolist()

    return run


def open_model(job, part):
    auto = AutoModelForSeq2SeqLM if job["reads_source"] else AutoModelForCausalLM
    model = auto.from_pretrained(job[part], dtype=torch.float32).eval()
    if not job["reads_source"]:
        model.generation_config.eos_token_id = None
    return model


if __name__ == "__main__":
    main(load)
