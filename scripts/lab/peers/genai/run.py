"""onnxruntime-genai, plain, with a draft model, and with prompt lookup."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime_genai as og
from peer_job import converted, main
from ways import check, parts_of, speculative_block


def load(job):
    check(job)

    def build(checkpoint, out):
        subprocess.run(
            ["bash", Path(__file__).with_name("build"), checkpoint, out, job["weights"]], check=True
        )

    folders = {part: converted(job, part, build) for part in parts_of(job)}
    way = f"{job['drafter'] or 'plain'}-{job['gamma']}-{job['ngram']}"
    folder = Path(job["work"]) / f"run-{job['weights']}-{way}-{job['threads']}"
    compose(folder, folders, job)
    model = og.Model(str(folder))

    def run(prompts):
        params = og.GeneratorParams(model)
        length = len(prompts[0]) + job["max_tokens"]
        params.set_search_options(do_sample=False, max_length=length, batch_size=len(prompts))
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [
            [int(token) for token in generator.get_sequence(row)][len(prompt) :]
            for row, prompt in enumerate(prompts)
        ]

    return run


def compose(folder, parts, job):
    """A configuration without end of sequence, with our threads, and with the draft where one is wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((parts["target"] / "genai_config.json").read_text())
    blocks = {"target": "decoder", "draft": "draft"}
    for part, path in parts.items():
        block = json.loads((path / "genai_config.json").read_text())["model"]["decoder"]
        # The library wants its files below the configuration.
        for file in path.glob("model.onnx*"):
            (folder / part).mkdir(exist_ok=True)
            (folder / part / file.name).unlink(missing_ok=True)
            os.link(file, folder / part / file.name)
        block["filename"] = f"{part}/model.onnx"
        block["session_options"]["intra_op_num_threads"] = job["threads"]
        # Two sessions' spinning pools would fight for the cores.
        if "draft" in parts:
            block["session_options"]["session.intra_op.allow_spinning"] = "0"
        config["model"][blocks[part]] = block
    if "draft" in parts:
        config["model"]["type"] = "speculative"
    if block := speculative_block(job):
        config["speculative"] = block
    config["model"]["eos_token_id"] = []  # no token ends an answer
    (folder / "genai_config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((parts["target"] / name).read_bytes())


if __name__ == "__main__":
    main(load)
