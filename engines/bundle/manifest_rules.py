"""What the numbers of a manifest must satisfy, each by itself and beside the others. Looks at no file."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import (
    LANGUAGE,
    TEXT,
    EncoderDecoder,
    SourceEntry,
    used_ids,
)
from outrider.engines.bundle.fields import check_levels
from outrider.engines.bundle.files import MANIFEST_FILE
from outrider.engines.bundle.limits import MOST_ROWS, MOST_SIZE, MOST_TOKENS, check_limits
from outrider.engines.bundle.manifest import (
    CACHES,
    DEVICE_PRECISIONS,
    HEADS,
    RINGS,
    Manifest,
    ModelEntry,
)
from outrider.engines.bundle.states import STATES


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest whose numbers are absurd or contradict one another, before any file is looked at.

    Raises:
        BundleError: naming the field.
    """
    parts = {"target": manifest.target} | ({"draft": manifest.draft} if manifest.draft else {})
    check_limits(
        [
            ("max_context", manifest.max_context, MOST_TOKENS),
            ("max_extend", manifest.max_extend, MOST_TOKENS),
            ("max_batch", manifest.max_batch, MOST_ROWS),
            ("max_gamma", manifest.max_gamma, manifest.max_extend - 1),
            *(
                ("eos_token_ids", one, manifest.target.vocab_size - 1)
                for one in manifest.eos_token_ids
            ),
            ("bos_token_id", manifest.bos_token_id or 0, manifest.target.vocab_size - 1),
        ]
    )
    check_levels(manifest.certificate, "certificate", where=MANIFEST_FILE)
    _check_plans(manifest)
    _check_head(manifest)
    if manifest.text2text is not None:
        _check_texts(manifest.text2text)
    for name, part in parts.items():
        for field_name in ("num_layers", "num_kv_heads", "head_size", "vocab_size"):
            check_limits([(f"{name}.{field_name}", getattr(part, field_name), MOST_SIZE)])
        check_limits([(f"{name}.max_tree_nodes", part.max_tree_nodes, manifest.max_extend)])
        _check_source(name, part, manifest)
        _check_states(name, part, manifest)
        _check_caches(name, part, manifest)
        _check_rings(name, part, manifest)
        if part.parallel_token is not None:
            check_limits([(f"{name}.parallel_token", part.parallel_token, part.vocab_size - 1)])
        if part.device_precision not in ("", *DEVICE_PRECISIONS):
            raise BundleError(
                f"{MANIFEST_FILE}: field '{name}.device_precision' must be empty or one of "
                f"{', '.join(DEVICE_PRECISIONS)}"
            )
        if part.max_tree_nodes == 1:
            raise BundleError(
                f"{MANIFEST_FILE}: field '{name}.max_tree_nodes' must be 0 or at least 2"
            )


def _check_plans(manifest: Manifest) -> None:
    for plan in manifest.plans:
        for profile in plan.profiles:
            for axis, sizes in profile.axes().items():
                if sorted(sizes) != list(sizes):
                    raise BundleError(
                        f"{MANIFEST_FILE}: field 'plans': {axis} of a profile of {plan.path} must be three "
                        "ascending integers"
                    )


def _check_texts(found: EncoderDecoder) -> None:
    """Refuse templates and languages that contradict one another."""
    name = "text2text.generation_defaults"
    check_levels(found.generation_defaults, name, where=MANIFEST_FILE)
    has_language = LANGUAGE in (*found.decoder_prefix, *found.source_template)
    wrong = {
        f"source_template' must have {TEXT!r} in one place": found.source_template.count(TEXT) != 1,
        "decoder_prefix' must not have 'text'": TEXT in found.decoder_prefix,
        f"languages' must not be empty: a template has a {LANGUAGE!r}": has_language
        and not found.languages,
    } | {
        f"{name}' must be empty or one of languages": getattr(found, name)
        not in ("", *found.languages)
        for name in ("default_source_language", "default_target_language")
    }
    for rule, is_broken in wrong.items():
        if is_broken:
            raise BundleError(f"{MANIFEST_FILE}: field 'text2text.{rule}")


def _check_source(name: str, part: ModelEntry, manifest: Manifest) -> None:
    """Refuse a model whose encoder and the manifest's part on texts contradict one another."""
    text2text, source = manifest.text2text, part.source
    if source is None:
        if text2text is not None:
            raise BundleError(f"{MANIFEST_FILE}: field '{name}.source' is missing")
        return
    if text2text is None:
        raise BundleError(f"{MANIFEST_FILE}: field 'text2text' is missing: {name} has an encoder")
    if source.shares_encoder and (name == "target" or not _fits(source, manifest.target.source)):
        raise BundleError(
            f"{MANIFEST_FILE}: field '{name}.source.shares_encoder' must be false: it is for drafts whose "
            "max_source, vocab_size and hidden_size are the target's"
        )
    check_limits(
        [
            (f"{name}.source.max_source", source.max_source, MOST_TOKENS),
            *(
                (f"{name}.source.{field_name}", getattr(source, field_name), MOST_SIZE)
                for field_name in ("num_heads", "head_size", "vocab_size", "hidden_size")
            ),
            *(
                (f"text2text.{field_name}", one, most - 1)
                for field_name, one, most in used_ids(text2text, source.vocab_size, part.vocab_size)
            ),
            ("text2text.decoder_prefix", len(text2text.decoder_prefix), manifest.max_context - 1),
            ("text2text.source_template", len(text2text.source_template), source.max_source),
        ]
    )
    # A draft reads whatever the target reads.
    of_target = manifest.target.source
    for field_name in ("max_source", "vocab_size") if of_target is not None else ():
        least = getattr(of_target, field_name)
        if getattr(source, field_name) < least:
            raise BundleError(
                f"{MANIFEST_FILE}: field '{name}.source.{field_name}' must be at least {least}, the target's"
            )


def _check_states(name: str, part: ModelEntry, manifest: Manifest) -> None:
    """Refuse a model without any cache, and one whose states contradict the rest."""
    states = part.states
    if states is None:
        for field_name in ("num_layers", "num_kv_heads", "head_size"):
            if not getattr(part, field_name):
                raise BundleError(f"{MANIFEST_FILE}: field '{name}.{field_name}' must be >= 1")
        return
    sizes = ("row", "heads", "key_size", "value_size")
    most = dict.fromkeys(("mixers", "kernel", "channels", *sizes), MOST_SIZE)
    check_limits(
        (f"{name}.states.{field_name}", getattr(states, field_name), limit)
        for field_name, limit in (most | {"max_open": MOST_TOKENS}).items()
    )
    wrong = {
        "requires' must have 'states'": STATES not in manifest.requires,
        f"{name}.states.max_open' must be at least max_gamma": states.max_open < manifest.max_gamma,
        f"{name}.states' must have a convolution or a scan": not states.channels and not states.row,
        f"{name}.states.row' must be 0 together with heads, key_size and value_size": len(
            {bool(getattr(states, field_name)) for field_name in sizes}
        )
        == 2,
        f"{name}.max_tree_nodes' must be 0: a tree would need a state per branch": part.max_tree_nodes
        > 0,
        f"{name}.device_precision' must be empty: states are kept on the CPU alone": part.device_precision
        != "",
        f"{name}.source' must be missing of a model with states": part.source is not None,
    }
    _refuse_first(wrong)


def _refuse_first(broken: Mapping[str, bool]) -> None:
    """Refuse the first rule that is broken; each begins behind the quote in front of its field."""
    for rule, is_broken in broken.items():
        if is_broken:
            raise BundleError(f"{MANIFEST_FILE}: field '{rule}")


def _check_caches(name: str, part: ModelEntry, manifest: Manifest) -> None:
    """Refuse caches by layer that contradict the rest."""
    if not part.caches:
        return
    check_limits((f"{name}.caches", size, MOST_SIZE) for one in part.caches for size in one)
    wrong = {
        "requires' must have 'caches'": CACHES not in manifest.requires,
        f"{name}.caches' must have an entry per layer": len(part.caches) != part.num_layers,
        f"{name}.caches' must begin with num_kv_heads and head_size": part.caches[0]
        != (part.num_kv_heads, part.head_size),
        f"{name}.device_precision' must be empty: caches that differ are for the CPU alone": part.device_precision
        != "",
    }
    _refuse_first(wrong)


def _check_rings(name: str, part: ModelEntry, manifest: Manifest) -> None:
    """Refuse rings that contradict the rest."""
    rings = part.rings
    if rings is None:
        return
    check_limits([(f"{name}.rings.columns", rings.columns, MOST_TOKENS)])
    wrong = {
        "requires' must have 'rings'": RINGS not in manifest.requires,
        f"{name}.rings.layers' must ascend, each below num_layers": not rings.layers
        or [*rings.layers] != sorted({*rings.layers} & {*range(part.num_layers)}),
        f"{name}.rings.columns' must hold window, max_extend and max_gamma tokens": rings.max_open(
            manifest.max_extend
        )
        < max(1, manifest.max_gamma),
        f"{name}.max_tree_nodes' must be 0 of a model with rings": part.max_tree_nodes > 0,
        f"{name}.states' must be missing of a model with rings": part.states is not None,
        f"{name}.source' must be missing of a model with rings": part.source is not None,
    }
    _refuse_first(wrong)


def _check_head(manifest: Manifest) -> None:
    """Refuse a head and a target whose features are not the same, and what no head drafts for."""
    target, draft = manifest.target, manifest.draft
    read = 0 if draft is None else draft.reads_features
    if not read and not target.gives_features:
        return
    check_limits([("target.gives_features", target.gives_features, MOST_SIZE)])
    wrong = {
        "requires' must have 'heads'": HEADS not in manifest.requires,
        "target.reads_features' must be 0: a head is a draft": target.reads_features > 0,
        "draft.gives_features' must be 0": draft is not None and draft.gives_features > 0,
        f"draft.reads_features' must be {target.gives_features}, what the target gives": read
        != target.gives_features,
        "target.caches' must end with the halves of gives_features": target.caches[-1:]
        != ((1, target.gives_features // 2),),
        "target.gives_features' must be even": target.gives_features % 2 != 0,
        "target.states' must be missing beside a head": target.states is not None,
        "target.rings' must be missing beside a head": target.rings is not None,
        "target.source' must be missing beside a head": target.source is not None,
    }
    _refuse_first(wrong)


def _fits(source: SourceEntry, other: SourceEntry | None) -> bool:
    """Return whether one encoder may answer for another."""
    sizes = ("max_source", "vocab_size", "hidden_size")
    return all(getattr(source, name) == getattr(other, name, None) for name in sizes)
