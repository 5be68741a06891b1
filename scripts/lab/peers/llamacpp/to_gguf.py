"""A Llama checkpoint of Hugging Face form as GGUF: float32, or q8_0 for the matrices; without a tokenizer."""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

ARCHITECTURE = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA]
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
    """Write ``out``/model.gguf; weights are float32 or int8."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(out / "model.gguf", ARCHITECTURE)
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
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")


def write_tensor(writer, config, name, values, weights):
    values = values.astype(np.float32)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for part, count in heads.items():
        if f".{part}." in name:
            values = interleaved(values, count)
    named = gguf_name(name)
    if weights == "int8" and values.ndim == 2:
        packed = gguf.quants.quantize(values, Kind.Q8_0)
        writer.add_tensor(named, packed, raw_dtype=Kind.Q8_0)
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
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"
