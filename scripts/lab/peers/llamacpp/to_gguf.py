"""A Llama or Qwen 2 checkpoint of Hugging Face form as GGUF, without a tokenizer.

Float32; or q8_0 for the matrices; or q4_0 for those of the layers and q8_0 for embeddings and head.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def convert(checkpoint: Path, out: Path, weights: str) -> None:
    """Write ``out``/model.gguf; weights are float32, int8 or int4."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(out / "model.gguf", config["model_type"])  # both names are GGUF's too
    write_facts(writer, config)
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                write_tensor(writer, config, name, file.get_tensor(name), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_facts(writer, config):
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")


def write_tensor(writer, config, name, values, weights):
    values = values.astype(np.float32)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for part, count in heads.items():
        # GGUF turns neighbours of Llama's heads, and halves of Qwen's, as the checkpoint does.
        if f".{part}." in name and config["model_type"] == "llama":
            values = interleaved(values, count)
    named = gguf_name(name)
    if weights != "float32" and values.ndim == 2:
        kind = Kind.Q4_0 if weights == "int4" and named.startswith("blk.") else Kind.Q8_0
        writer.add_tensor(named, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(named, values)


def interleaved(values, num_heads):
    """Rows of a projection in the order of GGUF's rotary pairs: (0, 1), where the checkpoint's are (0, D / 2)."""
    pairs = values.reshape(num_heads, 2, -1, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def gguf_name(name):
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")  # a weight or a bias
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"
