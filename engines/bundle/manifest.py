"""What ``manifest.json`` says: the models of a bundle, its limits, and every other file by size and SHA-256.

Knows no inference library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import EncoderDecoder, SourceEntry
from outrider.engines.bundle.fields import Count, Size, Text, read_json
from outrider.engines.bundle.files import MANIFEST_FILE, UNFINISHED_MANIFEST, FileEntry
from outrider.engines.bundle.plans import PlanEntry
from outrider.engines.bundle.serving_defaults import ServingDefaults
from outrider.engines.bundle.states import STATES, StatesEntry

SCHEMA_VERSION = 1
# Of bundles whose models have an encoder, which an earlier server cannot serve.
TEXT2TEXT_VERSION = 2
# Of bundles that name what a server must have for them; no later one changes what the version stands for.
REQUIRES_VERSION = 3
_VERSIONS = (SCHEMA_VERSION, TEXT2TEXT_VERSION, REQUIRES_VERSION)
CACHES = "caches"
"""Required by bundles with ``ModelEntry.caches``."""
RINGS = "rings"
"""Required by bundles with ``ModelEntry.rings``."""
HEADS = "heads"
"""Required by bundles whose draft reads the target's features."""
FEATURES: frozenset[str] = frozenset({STATES, CACHES, RINGS, HEADS})
"""What bundles may require and this server has."""
BFLOAT16 = "bfloat16"
DEVICE_PRECISIONS = ("float32", "float16", BFLOAT16)
W8A8 = "w8a8"
ACCEPTED_PARITY = "accepted_parity"
"""In a model's certificate: the difference from its checkpoint that was accepted beyond what rounding explains."""
TEXT_PART_OF = "text_part_of"
"""In a model's certificate: the kind of the whole model, where it is the text part of one that reads more than text."""
NO_DEVICE = "no_device"
"""In a model's certificate: why it has no graphs for accelerators, where its weights do not say."""
# Columns of a ring are a multiple of so many, as the capacities of other caches are.
_RING_STEP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RingsEntry:
    """Layers with a sliding window whose caches on the CPU are rings: token p in column p mod C.

    A ring holds what every token that may come next sees, and what a call writes behind it, so it takes no more however
    long a text is. Texts are truncated down to what was settled, as with states.

    Attributes:
        window: tokens that a layer sees.
        columns: C of each ring.
        layers: that keep one, ascending.
    """

    window: Count
    columns: Count
    layers: tuple[Size, ...]

    def max_open(self, max_extend: int) -> int:
        """Return the tokens that may stand behind the settled text while a call writes so many.

        The first of them sees ``window - 1`` tokens before it; from the last on a call pads to its longest span:

            [base - window + 1 ... base ... base + max_open ... base + max_open + max_extend)    columns + 1 at most
        """
        return self.columns + 1 - self.window - max_extend


def ring_columns(window: int, max_open: int, max_extend: int) -> int:
    """Return the columns of a ring for so many open tokens at least; see ``RingsEntry.max_open``."""
    least = window + max_open + max_extend - 1
    return -(-least // _RING_STEP) * _RING_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of a bundle.

    Attributes:
        path: folder inside the bundle, POSIX; the canonical graph is ``model.onnx`` in it.
        num_kv_heads: H of the cache; of the first layer, where it differs by layer.
        head_size: D of the cache, likewise.
        caches: H and D of each layer, where they differ; else empty.
        vocab_size: V of the logits.
        weights: storage of the weights, for example "float32" or "int8".
        max_tree_nodes: tokens of the largest tree; 0 where there is no ``tree.onnx``.
        narrowest_span: tokens of the narrowest span that has the bits of wider ones, in a batch of
            at least two rows: 1 or 2. One row alone may take 2 in any graph (``engines.onnx.batch_invariance``).
        device_precision: of the weights, products and caches of the graphs for accelerators, one of
            ``DEVICE_PRECISIONS``; empty where there are none.
        source: its encoder; None for a decoder-only model.
        states: its layers that keep a state; None without. ``num_layers`` counts those with keys and values.
        rings: its layers whose caches on the CPU are rings; None without.
        parallel_token: of a draft that proposes several tokens in one call: see ``EngineLimits``.
        gives_features: numbers of a token that a target caches for its draft, a head: halves of them are key and value
            of the last layer, to which nothing attends. 0 without a head.
        reads_features: numbers of a token that a head reads beside it; 0 of any other model.
    """

    path: Text
    num_layers: Size
    num_kv_heads: Size
    head_size: Size
    vocab_size: Count
    weights: Text
    # Bundles made before there were trees do not have the field; nor, below, those whose graphs do not pad attention
    # over single tokens, or take no lengths on accelerators.
    max_tree_nodes: Size = 0
    narrowest_span: Annotated[int, Meta(ge=1, le=2)] = 2
    device_precision: Text = ""
    source: SourceEntry | None = None
    states: StatesEntry | None = None
    parallel_token: Size | None = None
    caches: tuple[tuple[Count, Count], ...] = ()
    rings: RingsEntry | None = None
    gives_features: Size = 0
    reads_features: Size = 0

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """H and D of the cache of each layer."""
        return self.caches or ((self.num_kv_heads, self.head_size),) * self.num_layers

    @property
    def ring_columns(self) -> tuple[int, ...]:
        """The most columns that the CPU's cache of each layer has; 0 for as many as the text has tokens."""
        columns, layers = (self.rings.columns, self.rings.layers) if self.rings else (0, ())
        return tuple(columns if layer in layers else 0 for layer in range(self.num_layers))


def required(*models: ModelEntry | None) -> tuple[str, ...]:
    """Return the ``FEATURES`` that these models need."""
    needed = {STATES: "states", CACHES: "caches", RINGS: "rings", HEADS: "reads_features"}
    return tuple(
        sorted(
            name
            for name, field in needed.items()
            if any(one and getattr(one, field) for one in models)
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """Fields of a manifest that are read before the rest."""

    schema_version: Size
    requires: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """Fields that every written manifest has, though a new one begins without."""

    files: Mapping[str, object]
    versions: Mapping[str, object]
    certificate: Mapping[str, object]


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
        requires: names of ``FEATURES`` without which a server would read the rest wrongly.
    """

    target: ModelEntry
    draft: ModelEntry | None
    max_context: Count
    max_batch: Count
    max_gamma: Size
    max_extend: Count
    eos_token_ids: tuple[Size, ...]
    bos_token_id: Size | None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    versions: Mapping[str, Text] = field(default_factory=dict)
    certificate: Mapping[str, object] = field(default_factory=dict)
    plans: tuple[PlanEntry, ...] = ()
    serving: ServingDefaults | None = None
    text2text: EncoderDecoder | None = None
    sources: Mapping[str, Text] = field(default_factory=dict)
    requires: tuple[Text, ...] = ()

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
        if self.requires:
            return REQUIRES_VERSION
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
        for model in (values["target"], values["draft"]):
            for name in ("states", "parallel_token", "caches", "rings"):
                if model is not None and model[name] in (None, ()):
                    del model[name]
            for name in ("gives_features", "reads_features"):
                if model is not None and not model[name]:
                    del model[name]
        for name in ("sources", "requires"):
            # Likewise of bundles that say nothing of it.
            if not values[name]:
                del values[name]
        return json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Manifest of a text.

        Raises:
            BundleError: not JSON, another schema version, something required that this server does not have, or a
                field that is missing or breaks its rule, named.
        """
        header = read_json(text, _Header, where=MANIFEST_FILE)
        if header.schema_version not in _VERSIONS:
            raise BundleError(
                f"{MANIFEST_FILE}: schema_version {header.schema_version}, this server reads "
                f"{_VERSIONS[0]} to {_VERSIONS[-1]}; export the bundle again"
            )
        if lacking := sorted({*header.requires} - FEATURES):
            raise BundleError(
                f"{MANIFEST_FILE}: requires {', '.join(lacking)}, which this server does not have; "
                "serve it with a newer one"
            )
        read_json(text, _Written, where=MANIFEST_FILE)
        manifest = read_json(text, cls, where=MANIFEST_FILE)
        if header.schema_version != manifest.schema_version:
            raise BundleError(
                f"{MANIFEST_FILE}: field 'schema_version': expected {manifest.schema_version} of a bundle "
                f"{'without' if manifest.text2text is None else 'with'} text2text"
            )
        return manifest


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` whole or not at all."""
    draft = root / UNFINISHED_MANIFEST
    draft.write_text(manifest.to_json(), encoding="utf-8")
    draft.replace(root / MANIFEST_FILE)
