"""Whatever a field of a manifest holds, the bundle opens or is refused in one line that names the field."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from onnx import helper
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.encoder_decoder import (
    DEVICE_ENCODE_FILE,
    ENCODE_FILE,
    LANGUAGE,
    SOURCE_TOKENIZER_FILE,
    TEXT,
    EncoderDecoder,
    SourceEntry,
)
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import Manifest, ModelEntry, write_manifest
from outrider.engines.bundle.names import DEVICE_FILES, KEEP_PATH_FILE, MODEL_FILE, TREE_FILE
from outrider.engines.bundle.plans import PlanEntry, derive_profiles, rows_of_longest
from outrider.engines.bundle.serving_defaults import ServingDefaults
from outrider.runtime.serving.factory import _decided
from outrider.runtime.serving.settings import ServeOptions

PLAN = "plans/rtx.plan"


NUM_BYTES = 1 << 15


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


# As texts of JSON.
ABSURD = {
    "null": "null",
    "-1": "-1",
    "0": "0",
    "2**63": str(2**63),
    "1e308": "1e308",
    "infinite": "1e999",
    "not a number": "NaN",
    "endless": "9" * 10_000,
    "empty text": '""',
    "long text": json.dumps("x" * 10_000),
    "half a character": r'"\ud800"',
    "empty list": "[]",
    "empty object": "{}",
    "deep": nested(300),
    "deepest": nested(1000),
    "true": "true",
}
# Of these, what a field may hold: an empty text, list or object, true, or one number of many.
SOBER = {"null", "0", "true", "empty text", "empty list", "empty object"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a draft model, trees, graphs for accelerators, a plan and serving defaults; of empty graphs."""
    root = tmp_path_factory.mktemp("absurd") / "bundle"
    graph = helper.make_model(helper.make_graph([], "g", [], [])).SerializeToString()
    names = (ENCODE_FILE, TREE_FILE, KEEP_PATH_FILE, DEVICE_ENCODE_FILE, *DEVICE_FILES)
    graphs = [f"target/{name}" for name in names]
    for part in ("target", "draft"):
        (root / part).mkdir(parents=True)
        graphs.append(f"{part}/{MODEL_FILE}")
    graphs.append(f"draft/{ENCODE_FILE}")
    for name in graphs:
        (root / name).write_bytes(graph)
    (root / "plans").mkdir()
    for name in (PLAN, "tokenizer.json", SOURCE_TOKENIZER_FILE):
        (root / name).write_text("{}")
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_size": 4, "vocab_size": 16}
    source = SourceEntry(num_heads=2, head_size=4, max_source=32, vocab_size=16, hidden_size=8)
    draft = ModelEntry(path="draft", weights="float32", source=source, **sizes)
    target = replace(draft, path="target", max_tree_nodes=4, device_precision="float16")
    profiles = derive_profiles(max_batch=2, max_extend=8, max_gamma=4, gamma=2)
    plan = PlanEntry(
        path=PLAN,
        part="target",
        flavour="rtx",
        version="1",
        compute_capability="8.0",
        precision="float16",
        capacity=128,
        profiles=profiles[:1],
    )
    manifest = Manifest(
        target=target,
        draft=draft,
        max_context=64,
        max_batch=2,
        max_gamma=4,
        max_extend=8,
        eos_token_ids=(1,),
        bos_token_id=0,
        files=hash_files(root),
        versions={"onnx": "1"},
        certificate={"target": {"max_difference": 1e-7}},
        plans=(plan,),
        serving=ServingDefaults(
            drafter="lookahead", gamma=3, phrase_length=4, num_phrases=3, window=4, source="a test"
        ),
        text2text=EncoderDecoder(
            decoder_prefix=(2, LANGUAGE),
            source_template=(LANGUAGE, TEXT, 1),
            languages={"de": 3},
            default_source_language="de",
            banned_token_ids=(0,),
            generation_defaults={"num_beams": 4},
            has_source_tokenizer=True,
        ),
    )
    write_manifest(root, manifest)
    return root


def places(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of every field, of every object and list, and of the whole."""
    yield place
    if isinstance(value, (dict, list)):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*place, name))


def changed(text: str, place: tuple[str | int, ...], value: str) -> str:
    """Return the text of a manifest with another value, a text of JSON, at a place."""
    if not place:
        return value
    section = data = json.loads(text)
    for name in place[:-1]:
        section = section[name]
    section[place[-1]] = "HERE"
    return json.dumps(data).replace('"HERE"', value)


def opened(root: Path) -> None:
    """What opening a bundle does with its manifest before any library reads a graph."""
    bundle = load_bundle(root)
    manifest = bundle.manifest
    # It may be written again, and its certificate is handed to clients.
    assert Manifest.from_json(manifest.to_json()) == manifest
    json.dumps(dict(manifest.certificate), sort_keys=True).encode()
    for model in filter(None, (manifest.target, manifest.draft)):
        bundle.limits(model, with_trees=True)
        bundle.host_path(model)
        bundle.why_no_device(model, "8.0")
    for plan in manifest.plans:
        rows_of_longest(plan.profiles)
    options = _decided(bundle, ServeOptions(leaves_drafter=True, leaves_gamma=True))
    assert max(options.config.drafting.phrase_length, options.config.drafting.num_phrases) <= 16


def test_an_absurd_field_is_refused_by_name_or_means_something(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    path = root / "manifest.json"
    text = path.read_text()
    opened(root)
    file = os.open(path, os.O_WRONLY)
    taken: dict[tuple[str | int, ...], set[str]] = {}
    for place in places(json.loads(text)):
        names = [one for one in place if isinstance(one, str)]
        taken[place] = set()
        for kind, value in ABSURD.items():
            # In place, with spaces behind it: a new file each time takes as long as all else together.
            os.pwrite(file, changed(text, place, value).ljust(NUM_BYTES).encode(), 0)
            try:
                opened(root)
            except BundleError as error:
                line = str(error)
                assert line == " ".join(line.split()), (place, kind)
                assert len(line) < 5000, (place, kind)
                is_named = "manifest.json" in line or "path" in line
                assert is_named, (place, kind)
                assert not names or any(one in line for one in (*names, "not JSON")), (place, line)
            else:
                taken[place].add(kind)
    os.close(file)
    path.write_text(text)
    none = {"infinite", "not a number", "endless", "half a character", "deep", "deepest"}
    anything = {*ABSURD} - none
    plain = {"certificate", "generation_defaults"}  # JSON values that nobody reads at load
    for place, kinds in taken.items():
        assert kinds <= (anything if plain.intersection(place) else SOBER), place
    assert taken["max_gamma",] == {"0"}
    assert taken["draft",] == {"null"}
    assert taken["certificate", "target", "max_difference"] == anything
