"""A small canonical encoder-decoder model written operator by operator: ``encode.onnx`` and ``model.onnx``."""

import shutil
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.encoder_decoder import (
    ENCODE_FILE,
    SOURCE,
    SOURCE_LENGTH,
    EncoderDecoder,
    SourceEntry,
    cross_key_name,
    cross_past_names,
    cross_present_names,
    cross_value_name,
)
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import write_manifest
from outrider.engines.bundle.names import (
    LOGIT_POSITIONS,
    LOGITS,
    START,
    TOKENS,
    past_names,
    present_names,
)
from outrider.export.graph.shared_encoder import share_encoder

from tests.engines import handmade
from tests.engines.handmade import HEAD_SIZE, KV_HEADS, LAYERS, WIDTH, Decoder, V

SOURCE_V, MAX_SOURCE, MAX_BATCH, SOURCE_HEADS = 32, 150, 8, 4
INTS, FLOATS = TensorProto.INT64, TensorProto.FLOAT


class Answerer(Decoder):
    """The decoder, each of whose layers attends to the source too."""

    def layer(self, x: str, layer: int, ends: str) -> str:
        x = super().layer(x, layer, ends)
        query = self.heads(self.norm(x, f"cross_norm.{layer}"), f"cross_q.{layer}", SOURCE_HEADS)
        mixed = self.add(
            "Attention", query, cross_key_name(layer), cross_value_name(layer), "", "", "", SOURCE_LENGTH
        )  # fmt: skip
        return self.projected(x, mixed, f"cross_o.{layer}")

    def projected(self, x: str, mixed: str, name: str) -> str:
        mixed = self.add("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = self.add("Reshape", mixed, self.ints(f"{name}.shape", 0, 0, WIDTH))
        return self.add("Add", x, self.add("MatMul", mixed, self.weight(name, WIDTH, WIDTH)))

    def _model(self) -> onnx.ModelProto:
        texts = ["batch", self._kv_heads, "capacity", HEAD_SIZE]
        info = helper.make_tensor_value_info
        return self.model_of(
            [
                info(TOKENS, INTS, ["batch", "tokens"]),
                info(START, INTS, ["batch"]),
                info(LOGIT_POSITIONS, INTS, ["batch", "wanted"]),
                info(SOURCE_LENGTH, INTS, ["batch"]),
                *(info(name, FLOATS, texts) for name in past_names(LAYERS)),
                *(info(name, FLOATS, source_shape()) for name in cross_past_names(LAYERS)),
            ],
            [
                info(LOGITS, FLOATS, ["batch", "wanted", V]),
                *(info(name, FLOATS, texts) for name in present_names(LAYERS)),
            ],
        )

    def model_of(
        self, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "handmade", inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


class Encoder(Answerer):
    """A layer of attention in both directions, then what each layer of the decoder attends to."""

    def build(self) -> onnx.ModelProto:
        x = self.add("Gather", self.weight("embedding", SOURCE_V, WIDTH), SOURCE)
        h = self.norm(x, "norm")
        query, key, value = (self.heads(h, name, SOURCE_HEADS) for name in "qkv")
        x = self.projected(
            x, self.add("Attention", query, key, value, "", "", "", SOURCE_LENGTH), "o"
        )
        h = self.norm(x, "last_norm")
        zeros = self.add("Expand", self.ints("zero", 0), self.add("Shape", SOURCE_LENGTH))
        names = zip(cross_past_names(LAYERS), cross_present_names(LAYERS), strict=True)
        for past, present in names:
            self.add("TensorScatter", past, self.heads(h, f"to.{past}", SOURCE_HEADS), zeros, out=present)  # fmt: skip
        info = helper.make_tensor_value_info
        return self.model_of(
            [
                info(SOURCE, INTS, ["batch", "length"]),
                info(SOURCE_LENGTH, INTS, ["batch"]),
                *(info(name, FLOATS, source_shape()) for name in cross_past_names(LAYERS)),
            ],
            [info(name, FLOATS, source_shape()) for name in cross_present_names(LAYERS)],
        )


class DraftEncoder(Encoder):
    """The same encoder before other projections; the constant ``changed`` is another one, if it is named."""

    def __init__(self, nan_token: int | None, kv_heads: int, *, changed: str = "") -> None:
        super().__init__(nan_token, kv_heads)
        self._changed = [changed, *(f"to.{name}" for name in cross_past_names(LAYERS))]

    def build(self) -> onnx.ModelProto:
        model = super().build()
        for constant in model.graph.initializer:
            if constant.name in self._changed:
                values = numpy_helper.to_array(constant).copy()
                values.flat[0] += 0.5
                constant.CopyFrom(numpy_helper.from_array(values, constant.name))
        return model


def source_shape() -> list[str | int]:
    return ["batch", SOURCE_HEADS, "source_capacity", HEAD_SIZE]


def write_source_bundle(root: Path, *, nan_token: int | None = None) -> Path:
    """A bundle of the handmade model; the source's token ``nan_token`` is embedded as NaN."""
    handmade.write_bundle(root)
    for name, made in (
        ("model", Answerer(None, KV_HEADS)),
        ("encode", Encoder(nan_token, KV_HEADS)),
    ):
        path = root / "target" / f"{name}.onnx"
        onnx.save(onnx.shape_inference.infer_shapes(made.build()), path)
    (root / "manifest.json").unlink()
    manifest = handmade.manifest_of(root)
    source = SourceEntry(
        num_heads=SOURCE_HEADS,
        head_size=HEAD_SIZE,
        max_source=MAX_SOURCE,
        vocab_size=SOURCE_V,
        hidden_size=WIDTH,
    )
    manifest = replace(
        manifest,
        target=replace(manifest.target, source=source),
        max_batch=MAX_BATCH,
        files=hash_files(root),
        text2text=EncoderDecoder(
            decoder_prefix=(0,), source_template=("text",), languages={}, has_source_tokenizer=False,
            shares_vocabulary=False, banned_token_ids=(), generation_defaults={},
        ),
    )  # fmt: skip
    write_manifest(root, manifest)
    load_bundle(root)
    return root


def write_draft(root: Path, *, changed: str = "") -> bool:
    """Give a source bundle a draft that shares the target's encoder, if it can; whether it does."""
    manifest = load_bundle(root).manifest
    shutil.copytree(root / "target", root / "draft")
    encoder = DraftEncoder(None, KV_HEADS, changed=changed).build()
    onnx.save(onnx.shape_inference.infer_shapes(encoder), root / "draft" / ENCODE_FILE)
    target, draft = (root / part / ENCODE_FILE for part in ("target", "draft"))
    shares = share_encoder(target, draft, hidden_size=WIDTH)
    assert manifest.target.source is not None
    source = replace(manifest.target.source, shares_encoder=shares)
    entry = replace(manifest.target, path="draft", source=source)
    (root / "manifest.json").unlink()
    write_manifest(root, replace(manifest, draft=entry, files=hash_files(root)))
    return shares
