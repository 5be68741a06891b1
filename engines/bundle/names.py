"""The files of a bundle by name, and the tensors that its graphs take and give."""

from __future__ import annotations

from functools import cache

TOKENIZER_FILE = "tokenizer.json"
# Of decoder-only models whose checkpoints have them: chat templates CHAT_FOLDER/NAME.jinja, the tokens they use, and
# what is asked for in generation.
CHAT_FOLDER = "chat"
TEMPLATE_SUFFIX = ".jinja"
CHAT_TOKENS_FILE = f"{CHAT_FOLDER}/special_tokens.json"
GENERATION_DEFAULTS_FILE = "generation_defaults.json"
WEIGHTS_SUFFIX = ".onnx.data"
MODEL_FILE = "model.onnx"
GROUPED_FILE = "grouped.onnx"
RINGS_FILE = "rings.onnx"
TREE_FILE = "tree.onnx"
KEEP_PATH_FILE = "keep_path.onnx"
DEVICE_FILE = "device.onnx"
DEVICE_TREE_FILE = "device_tree.onnx"
DEVICE_KEEP_PATH_FILE = "device_keep_path.onnx"
DEVICE_FILES = (DEVICE_FILE, DEVICE_TREE_FILE, DEVICE_KEEP_PATH_FILE)

TOKENS = "tokens"
START = "start"
LOGIT_POSITIONS = "logit_positions"
LOGITS = "logits"
# Of a head's model.onnx alone: what it reads beside each token, [batch, tokens, F] float32, and what the token behind
# reads where the target has none yet, likewise.
FEATURES = "features"
RECYCLED = "recycled"
# Of device.onnx and device_tree.onnx: start + tokens, [batch] int64.
LENGTHS = "lengths"
# Of tree.onnx and grouped.onnx: [batch, tokens] int64.
POSITIONS = "positions"
# Of grouped.onnx alone (``engines.onnx.packed_inputs``): the numbers of the cache's columns, [capacity] float32;
# positions of the rows of a head's queries, [batch, 1, queries, 1] float32, of which a graph whose axis has the name
# EITHER_ROWS takes those of grouped heads or of heads apart; where attention's answers to
# packed rows stand, [1, rows, query heads, 3] int64, and likewise [1, wanted, ...] of rows whose logits are wanted;
# positions of packed rows where places have an embedding, [1, rows] int64; and head_rows_name(h).
CACHE_COLUMNS = "cache_columns"
QUERY_POSITIONS = "query_positions"
EITHER_ROWS = "grouped_or_apart"
ROW_HEADS = "row_heads"
WANTED_HEADS = "wanted_heads"
ROW_POSITIONS = "row_positions"
HEAD_ROWS = "head_rows."
# Of tree.onnx alone: [batch, tokens, tokens] bool.
ANCESTORS = "ancestors"
# Of keep_path.onnx alone: cache columns to copy to ``start`` and on, [kept] int64.
COLUMNS = "columns"


def head_rows_name(num_heads: int) -> str:
    """Input of ``grouped.onnx``: where the rectangle's heads stand in packed rows, [batch, h, tokens] int64."""
    return f"{HEAD_ROWS}{num_heads}"


def key_name(layer: int) -> str:
    """Input of a layer's cached keys, [batch, H, capacity, D] float32."""
    return f"key.{layer}"


def value_name(layer: int) -> str:
    """Input of a layer's cached values, [batch, H, capacity, D] float32."""
    return f"value.{layer}"


def new_key_name(layer: int) -> str:
    """Output of a layer's updated keys, bound to the memory of ``key_name(layer)``."""
    return f"new_key.{layer}"


def new_value_name(layer: int) -> str:
    """Output of a layer's updated values, bound to the memory of ``value_name(layer)``."""
    return f"new_value.{layer}"


@cache
def past_names(num_layers: int) -> tuple[str, ...]:
    """Return the inputs of all caches: key.0, value.0, key.1, value.1 ..."""
    return tuple(name(layer) for layer in range(num_layers) for name in (key_name, value_name))


@cache
def present_names(num_layers: int) -> tuple[str, ...]:
    """Return the outputs of all caches, each bound to the memory of its like in ``past_names``."""
    names = (new_key_name, new_value_name)
    return tuple(name(layer) for layer in range(num_layers) for name in names)


def is_cache(name: str) -> bool:
    """Return whether a graph's input or output of this name is a cache."""
    return name.startswith(("key.", "value.", "new_key.", "new_value."))
