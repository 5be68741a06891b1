"""OpenVINO GenAI, plain, with a draft model, and with prompt lookup."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from peer_job import converted, main
from ways import WEIGHT_FORMATS, check, device_options, generation_settings, pipeline_options


def load(job):
    def export(checkpoint, out):
        command = [
            Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", checkpoint,
            "--task", "text-generation-with-past", "--weight-format", WEIGHT_FORMATS[job["weights"]], out,
        ]  # fmt: skip
        subprocess.run(command, check=True)

    check(job)
    config = openvino_genai.GenerationConfig()
    for name, value in generation_settings(job).items():
        setattr(config, name, value)
    options, more = device_options(job), pipeline_options(job)
    if job["drafter"] == "model":
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
