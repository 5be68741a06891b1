"""The command ``llm``, which knows a server by a file of its settings."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = f"{sys.argv[1]}/v1", sys.argv[2]
QUESTION = "What is the capital of France? Answer in one word."

with tempfile.TemporaryDirectory() as folder:
    known = [{"model_id": "here", "model_name": MODEL, "api_base": URL}]
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps(known))
    command = [Path(sys.executable).with_name("llm"), "-m", "here", "-o", "temperature", "0"]
    answers = [
        subprocess.run(
            [*command, *options, QUESTION],
            env={**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "any"},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for options in (["--no-stream"], [])
    ]
print(json.dumps({"text": answers[0], "streamed": answers[1]}))
