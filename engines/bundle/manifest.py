"""What ``manifest.json`` says: the models of a bundle, its limits, and every other file by size and SHA-256.

Knows no inference library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import (
    EncoderDecoder,
    SourceEntry,
    read_source_entry,
    read_text2text,
)
from outrider.engines.bundle.fields import FieldReader
from outrider.engines.bundle.files import MANIFEST_FILE, UNFINISHED_MANIFEST, FileEntry
from outrider.engines.bundle.plans import PlanEntry, read_plans
from outrider.engines.bundle.serving_defaults import ServingDefaults, read_serving_defaults

SCHEMA_VERSION = 1
# Of bundles whose models have an encoder, which an earlier server cannot serve.
TEXT2TEXT_VERSION = 2
BFLOAT16 = "bfloat16"
DEVICE_PRECISIONS = ("float32", "float16", BFLOAT16)
W8A8 = "w8a8"
ACCEPTED_PARITY = "accepted_parity"
"""In a model's certificate: the difference from its checkpoint that was accepted beyond what rounding explains."""
NO_DEVICE = "no_device"
"""In a model's certificate: why it has no graphs for accelerators, where its weights do not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of a bundle.

    Attributes:
        path: folder inside the bundle, POSIX; the canonical graph is ``model.onnx`` in it.
        num_kv_heads: H of the cache.
        head_size: D of the cache.
        vocab_size: V of the logits.
        weights: storage of the weights, for example "float32" or "int8".
        max_tree_nodes: tokens of the largest tree; 0 where there is no ``tree.onnx``.
        narrowest_span: tokens of the narrowest span that has the bits of wider ones, in a batch of
            at least two rows: 1 or 2. One row alone may take 2 in any graph (``engines.onnx.batch_invariance``).
        device_precision: of the weights, products and caches of the graphs for accelerators, one of
            ``DEVICE_PRECISIONS``; empty where there are none.
        source: its encoder; None for a decoder-only model.
    """

    path: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    weights: str
    max_tree_nodes: int = 0
    narrowest_span: int = 2
    device_precision: str = ""
    source: SourceEntry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of ``manifest.json``.

    Attributes:
        max_context: tokens of one slot that may ever be valid.
        max_batch: slots at most.
        max_gamma: draft tokens per step at most.
        max_extend: tokens of one span at most.
        files: every file of the bundle but the manifest, by POSIX path inside it.
        versions: of the packages that made it.
        certificate: what the parity check found; JSON values.
        plans: TensorRT plans built from its graphs.
        serving: how it is best served, if that was measured.
        text2text: how requests become tokens where the models have encoders; None for decoder-only ones.
        sources: where checkpoints were fetched from, "organisation/model@commit" by "target" and "draft"; those
            exported from folders have none.
    """

    target: ModelEntry
    draft: ModelEntry | None
    max_context: int
    max_batch: int
    max_gamma: int
    max_extend: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    certificate: Mapping[str, object] = field(default_factory=dict)
    plans: tuple[PlanEntry, ...] = ()
    serving: ServingDefaults | None = None
    text2text: EncoderDecoder | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def no_device(self, path: str) -> str:
        """Return why a model has no graphs for accelerators; empty where its certificate does not say."""
        found = self.certificate.get(path)
        return str(found.get(NO_DEVICE, "")) if isinstance(found, Mapping) else ""

    def accepted_parity(self, path: str) -> float | None:
        """Return the difference from its checkpoint that a model's export was told to accept; None without."""
        found = self.certificate.get(path)
        accepted = found.get(ACCEPTED_PARITY) if isinstance(found, Mapping) else None
        return float(accepted) if isinstance(accepted, (int, float)) else None

    def accepted_words(self) -> str:
        """Return what differences were accepted, in words; empty where none was."""
        paths = [one.path for one in (self.target, self.draft) if one is not None]
        told = [(path, self.accepted_parity(path)) for path in paths]
        return "; ".join(
            f"{path}: its logits may differ by {accepted:.3g} from its checkpoint's, beyond its own rounding, "
            "as the export was told to accept (--accept-parity)"
            for path, accepted in told
            if accepted is not None
        )

    @property
    def schema_version(self) -> int:
        """Return the version of the manifest's form: the least that can say all of it."""
        return SCHEMA_VERSION if self.text2text is None else TEXT2TEXT_VERSION

    def to_json(self) -> str:
        """Text of the manifest, keys sorted, so that equal manifests are equal files."""
        values = asdict(self) | {"schema_version": self.schema_version}
        if self.text2text is None:
            # Byte for byte the form that servers without encoders read.
            del values["text2text"]
            for model in (values["target"], values["draft"]):
                if model is not None:
                    del model["source"]
        if not self.sources:
            # Likewise of bundles that say nothing of it.
            del values["sources"]
        return json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Manifest of a text.

        Raises:
            BundleError: not JSON, another schema version, or a field that is missing or of the
                wrong kind, named.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{MANIFEST_FILE}: not JSON: {error}") from error
        reader = FieldReader(data, where=MANIFEST_FILE)
        schema_version = reader.count("schema_version", at_least=0)
        if schema_version not in (SCHEMA_VERSION, TEXT2TEXT_VERSION):
            raise BundleError(
                f"{MANIFEST_FILE}: schema_version {schema_version}, this server reads "
                f"{SCHEMA_VERSION} and {TEXT2TEXT_VERSION}; export the bundle again"
            )
        text2text = read_text2text(reader)
        if (text2text is None) != (schema_version == SCHEMA_VERSION):
            raise reader.wrong("text2text", f"given in schema_version {TEXT2TEXT_VERSION} alone")
        draft = reader.optional_section("draft")
        return cls(
            target=_model_entry(reader.section("target")),
            draft=None if draft is None else _model_entry(draft),
            max_context=reader.count("max_context"),
            max_batch=reader.count("max_batch"),
            max_gamma=reader.count("max_gamma", at_least=0),
            max_extend=reader.count("max_extend"),
            eos_token_ids=reader.counts("eos_token_ids"),
            bos_token_id=reader.optional_count("bos_token_id"),
            files={
                name: FileEntry(sha256=entry.text("sha256"), size=entry.count("size", at_least=0))
                for name, entry in reader.section("files").sections()
            },
            versions=reader.section("versions").texts(),
            certificate=reader.plain("certificate"),
            plans=read_plans(reader.items("plans")),
            serving=read_serving_defaults(reader),
            text2text=text2text,
            # Bundles made from folders do not have the field.
            sources=reader.section("sources").texts() if "sources" in reader.values else {},
        )


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` whole or not at all."""
    draft = root / UNFINISHED_MANIFEST
    draft.write_text(manifest.to_json(), encoding="utf-8")
    draft.replace(root / MANIFEST_FILE)


def _model_entry(reader: FieldReader) -> ModelEntry:
    return ModelEntry(
        path=reader.text("path"),
        num_layers=reader.count("num_layers"),
        num_kv_heads=reader.count("num_kv_heads"),
        head_size=reader.count("head_size"),
        vocab_size=reader.count("vocab_size"),
        weights=reader.text("weights"),
        # Bundles made before there were trees do not have the field.
        max_tree_nodes=reader.count("max_tree_nodes", at_least=0, default=0),
        # Nor those whose graphs do not pad attention over single tokens.
        narrowest_span=reader.count("narrowest_span", at_most=2, default=2),
        device_precision=_device_precision(reader),
        source=read_source_entry(reader),
    )


def _device_precision(reader: FieldReader) -> str:
    # Bundles made before graphs for accelerators took lengths do not have the field.
    found = reader.values.get("device_precision", "")
    if not isinstance(found, str) or found not in ("", *DEVICE_PRECISIONS):
        raise reader.wrong("device_precision", f"one of {', '.join(DEVICE_PRECISIONS)}, or empty")
    return found
