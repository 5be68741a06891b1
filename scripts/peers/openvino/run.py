"""OpenVINO GenAI, plain and with a draft model."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from peer_job import converted, main

FORMATS = {"float32": "fp32", "int8": "int8"}


def load(job):
    def export(checkpoint, out):
        command = [
            Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", checkpoint,
            "--task", "text-generation-with-past", "--weight-format", FORMATS[job["weights"]], out,
        ]  # fmt: skip
        subprocess.run(command, check=True)

    options = {"INFERENCE_NUM_THREADS": job["threads"]}
    if job["weights"] == "float32":
        options |= {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = job["max_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    more = {}
    if job["gamma"]:
        config.num_assistant_tokens = job["gamma"]
        more["draft_model"] = openvino_genai.draft_model(
            str(converted(job, "draft", export)), "CPU", **options
        )
    pipeline = openvino_genai.LLMPipeline(
        str(converted(job, "target", export)), "CPU", **options, **more
    )

    def run(prompts):
        tokens = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens))
        )
        return [[int(token) for token in row] for row in pipeline.generate(inputs, config).tokens]

    return run


if __name__ == "__main__":
    main(load)
