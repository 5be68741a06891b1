"""Opens a bundle for serving: the settings in force, engines, sampler, worker and measured step costs."""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.files import MANIFEST_FILE
from outrider.engines.bundle.manifest import W8A8, Manifest, ModelEntry
from outrider.engines.bundle.renewal import gains_of_export
from outrider.engines.bundle.serving_defaults import ServingDefaults
from outrider.engines.determinism import BitEquality
from outrider.engines.devices import CPU, OVERFLOW, integer_sums_overflow, threads_of
from outrider.engines.kv_cache import PATIENCE
from outrider.engines.memory.huge_pages import use_everywhere
from outrider.engines.memory.room import cache_bytes, fit_memory
from outrider.engines.memory.sizes import machine_memory_bytes, size_words
from outrider.engines.opening import choose_device, judge_bits, open_pair, parse_or_choose
from outrider.engines.pair import Pair
from outrider.engines.rounds import do_nothing
from outrider.runtime.calibration.calibrate import calibrate
from outrider.runtime.calibration.store import load_or_measure, table_name
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import AUTO
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.params import GrammarKind
from outrider.runtime.core.text import Decoder
from outrider.runtime.drafters.registry import any_proposes_trees, tuned_drafter
from outrider.runtime.gamma.costs import CostTable
from outrider.runtime.gamma.verdicts import verdict_words
from outrider.runtime.grammar.compile import GrammarCompiler
from outrider.runtime.grammar.constraint import GrammarConstraints
from outrider.runtime.grammar.library import INSTALL, is_installed
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.prefix_cache.tree import TOKEN_BYTES
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.chat.files import read_chat, read_generation_defaults
from outrider.runtime.serving.generation_defaults import request_defaults
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.requests.defaults import NO_DEFAULTS, RequestDefaults
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.supervision.memory import trimmer
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TokenizersCodec, open_codec

log = logging.getLogger(__name__)

LEAST_PRIORITY = 19  # Linux knows nobody nicer

PRIVATE = "memory of its own: the bundle's files may change"
MAPPED = "files, since memory for a copy is missing: they are watched, and a change ends serving"


def load_model(
    root: Path, options: ServeOptions, on_beat: Callable[[], None] = do_nothing
) -> LoadedModel:
    """Return engines, sampler and worker of a bundle, not yet started.

    Args:
        root: folder of the bundle.
        options: to serve with.
        on_beat: as of ``Worker``.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: a setting cannot be used.
    """
    bundle, options = _open_bundle(root, options)
    config, manifest = options.config, bundle.manifest
    max_batch = min(config.max_running, manifest.max_batch)
    pair, codec, (constraints, no_constraints) = _open_beside(bundle, options, max_batch)
    chats = open_chats(bundle, codec)
    costs = None
    if config.default_gamma is None and manifest.max_gamma > 0:
        costs = bundle_costs(bundle, options, lambda: nullcontext(pair), codec, max_batch)
    log.info("sampling %s", pair.place)
    config = _with_prefix_cache(config, pair)
    on_host = parse_or_choose(options.device, bundle).kind == CPU
    bit_equality, is_mapped = _log_promises(bundle, pair, on_host), bundle.is_mapped()
    engines = _served(pair, manifest.max_gamma, costs)
    worker = Worker(engines, config=config, decoder=codec, on_beat=on_beat, constraints=constraints)
    control = worker.snapshot().control
    for one in () if control is None else control.verdicts:
        log.info("%s", verdict_words(one.drafter, one.alpha, one.least_alpha))
    model = _served_model(
        manifest,
        codec,
        worker,
        name=options.name_of(root),
        can_adapt=costs is not None,
        constraints=() if constraints is None else tuple(GrammarKind),
        no_constraints=no_constraints,
        chat_templates=() if chats is None else chats.names,
        has_rings=on_host,
    )
    asked = read_generation_defaults(bundle)
    limits, defaults = _with_generation_defaults(options, manifest, model, asked)
    return LoadedModel(
        worker=worker,
        codec=codec,
        model=model,
        config=config,
        limits=limits,
        defaults=defaults,
        certificate=manifest.certificate,
        bit_equality=bit_equality,
        weights_are_private=not is_mapped,
        mapped=bundle if is_mapped else None,
        close=pair.close,
        grammars=grammar_compiler(model, codec, constraints),
        chats=chats,
        generation_defaults=asked,
    )


def _open_beside(
    bundle: Bundle, options: ServeOptions, max_batch: int
) -> tuple[Pair, TokenizersCodec, tuple[GrammarConstraints | None, str]]:
    """Open engines, tokenizer and what constrains answers beside one another, and hash weights: each takes seconds."""
    with ThreadPoolExecutor(2) as aside:
        hashing = aside.submit(bundle.check_weights)
        opening = aside.submit(open_engines, bundle, options, max_batch)
        try:
            codec = open_codec(bundle)
            constraints = open_constraints(bundle.manifest, codec)
            # Whatever engines make of changed weights, that is what is told.
            hashing.result()
        except BaseException:
            with suppress(Exception):
                opening.result().close()
            raise
        return opening.result(), codec, constraints


def _open_bundle(root: Path, options: ServeOptions) -> tuple[Bundle, ServeOptions]:
    """Return a bundle as this machine holds it, and the options to serve it with."""
    bundle = load_bundle(root, options.trusted_signers, hashes_weights=False)
    if bundle.signer:
        log.info("the bundle is signed by %s", bundle.signer)
    options = _decided(bundle, options)
    return _with_room(bundle, options), options


def _served(pair: Pair, max_gamma: int, costs: CostTable | None) -> ServedEngines:
    return ServedEngines(
        target=pair.target,
        draft=pair.draft,
        sampler=pair.sampler,
        max_gamma=max_gamma,
        rounds=pair.rounds,
        costs=costs,
    )


def _served_model(
    manifest: Manifest,
    codec: TokenizersCodec,
    worker: Worker,
    *,
    name: str,
    can_adapt: bool,
    constraints: tuple[str, ...],
    no_constraints: str,
    chat_templates: tuple[str, ...],
    has_rings: bool,
) -> ServedModel:
    of_token, _ = cache_bytes(manifest, manifest.max_context, has_rings=has_rings)
    return ServedModel(
        name=name,
        can_adapt=can_adapt,
        constraints=constraints,
        no_constraints=no_constraints,
        chat_templates=chat_templates,
        vocab_size=manifest.target.vocab_size,
        max_context=manifest.max_context,
        max_gamma=manifest.max_gamma,
        eos_token_ids=manifest.eos_token_ids,
        drafters=(*worker.drafter_names, AUTO),
        guessers=worker.guesser_names,
        max_beams=worker.max_beams,
        gained_by_export=gains_of_export(manifest),
        cache_bytes_per_token=of_token,
        **_of_sources(manifest, codec),
    )


def _log_promises(bundle: Bundle, pair: Pair, on_host: bool) -> BitEquality:
    """Log what this server can promise; return what is known of the claim that a row's bits depend on nothing else."""
    bit_equality, line = judge_bits(bundle, pair)
    if line:
        level = logging.WARNING if bit_equality is BitEquality.WITHDRAWN else logging.INFO
        log.log(level, "%s", line)
    if accepted := bundle.manifest.accepted_words():
        log.warning("%s", accepted)
    manifest = bundle.manifest
    kinds = {one.weights for one in (manifest.target, manifest.draft) if one is not None}
    if on_host and W8A8 in kinds and integer_sums_overflow():
        log.warning("%s", OVERFLOW)
    if bundle.is_mapped():
        log.warning("serving from %s", MAPPED)
    else:
        log.info("serving from %s", PRIVATE)
    return bit_equality


def _with_room(bundle: Bundle, options: ServeOptions) -> Bundle:
    """Return the bundle with the slots and the context that this machine holds; say which."""
    asked, most = options.max_context, bundle.manifest.max_context
    if asked is not None and not 2 <= asked <= most:
        raise ConfigError("max_context", f"must be in [2, {most}], the bundle's")
    on_host = parse_or_choose(options.device, bundle).kind == CPU
    bundle, words = fit_memory(
        bundle,
        max_running=options.config.max_running,
        max_context=asked,
        prefix_bytes=options.config.prefix_cache_bytes,
        memory_bytes=machine_memory_bytes() if on_host else None,
        has_rings=on_host,
    )
    log.info("%s", words)
    return bundle


def _with_prefix_cache(config: ServerConfig, pair: Pair) -> ServerConfig:
    """Return the settings without a cache of prefixes where these engines can have none; say what it holds."""
    if not config.prefix_cache_bytes:
        return config
    engines = [engine for engine in (pair.target, pair.draft) if engine is not None]
    engines = [engine for engine in engines if not engine.limits.reads_features]
    are_read = all(one.token_bytes or one.state_bytes for one in engines)
    if pair.target.limits.max_source or pair.rounds or not are_read:
        where = "with an encoder" if pair.target.limits.max_source else "on this device"
        log.info("no prefix cache: there is none for models %s", where)
        return replace(config, prefix_cache_bytes=0)
    of_text = sum(one.state_bytes for one in engines)
    if (largest := max(one.state_bytes for one in engines)) > config.prefix_cache_bytes:
        log.warning(
            "prefix cache: texts whose state takes %s are not kept, --prefix-cache-bytes is less",
            size_words(largest),
        )
    log.info(
        "prefix cache: %.0f MiB at most, %d tokens of target and draft%s; --prefix-cache-bytes 0 for none",
        config.prefix_cache_bytes / 2**20,
        config.prefix_cache_bytes // sum(one.token_bytes + TOKEN_BYTES for one in engines),
        f" and up to {size_words(of_text)} of states a text" if of_text else "",
    )
    return config


def open_constraints(
    manifest: Manifest, codec: TokenizersCodec
) -> tuple[GrammarConstraints | None, str]:
    """Return what makes constraints of answers, or None and the rule that requests for one break."""
    if not is_installed():
        return None, INSTALL
    if not manifest.eos_token_ids:
        return None, "needs a model with an end token"
    vocab_size = manifest.target.vocab_size
    try:
        return GrammarConstraints(codec.source, vocab_size, manifest.eos_token_ids), ""
    except ValueError as error:
        log.warning("no forms of answers are served: %s", error)
        return None, "needs a tokenizer that llguidance can read"


def grammar_compiler(
    model: ServedModel, codec: TokenizersCodec, constraints: GrammarConstraints | None = None
) -> GrammarCompiler | None:
    """Return what tries grammars of requests; None where none are served. ``constraints`` are this process's."""
    if not model.constraints:
        return None
    return GrammarCompiler(
        codec.source, model.vocab_size, model.eos_token_ids, constraints=constraints
    )


def open_chats(bundle: Bundle, codec: TokenizersCodec) -> ChatEncoder | None:
    """Return what renders conversations; None where a bundle has no template, or its model an encoder."""
    files = None if bundle.manifest.text2text is not None else read_chat(bundle)
    return None if files is None else ChatEncoder(files, codec)


def _of_sources(manifest: Manifest, codec: TokenizersCodec) -> dict[str, Any]:
    """Return what ``ServedModel`` says of prompts, and tell what memory sources take."""
    entry, encoder_decoder = manifest.target.source, manifest.text2text
    if entry is None or encoder_decoder is None or not isinstance(codec, EncoderDecoderCodec):
        return {"max_token_bytes": codec.max_token_bytes}
    models = [one for one in (manifest.target, manifest.draft) if one is not None]
    token_bytes = sum(source_bytes(one) for one in models)
    log.info(
        "sources: %d tokens at most, %d bytes per slot and token in float32: %.1f MiB per slot",
        entry.max_source,
        token_bytes,
        entry.max_source * token_bytes / 2**20,
    )
    return {
        "max_token_bytes": codec.sources.max_token_bytes,
        "max_source": entry.max_source,
        "source_vocab_size": entry.vocab_size,
        "shares_vocabulary": encoder_decoder.shares_vocabulary,
        "banned_token_ids": encoder_decoder.banned_token_ids,
    }


def source_bytes(entry: ModelEntry) -> int:
    """Return the bytes that a token of a source takes in a slot: keys and values of each layer, in float32."""
    source = entry.source
    return 0 if source is None else 8 * entry.num_layers * source.num_heads * source.head_size


def _with_generation_defaults(
    options: ServeOptions, manifest: Manifest, model: ServedModel, asked: Mapping[str, object]
) -> tuple[RequestLimits, RequestDefaults]:
    """Return limits and defaults of requests, as the options want them; ``asked`` is what the checkpoint asks for."""
    limits, encoder_decoder = options.limits, manifest.text2text
    if not options.applies_generation_defaults:
        return limits, NO_DEFAULTS
    num_prefix = 1 if encoder_decoder is None else len(encoder_decoder.decoder_prefix)
    defaults, line = request_defaults(asked, num_prefix=num_prefix, limits=limits, model=model)
    log.info("%s", line)
    if defaults.max_tokens is not None:
        limits = replace(limits, default_max_tokens=defaults.max_tokens)
    return limits, defaults


def _decided(bundle: Bundle, options: ServeOptions) -> ServeOptions:
    """Return the options with a device, and with the bundle's defaults where the operator set none.

    Raises:
        BundleError: a default of the bundle is out of range.
        ConfigError: there are no generation defaults to apply.
    """
    is_bare = bundle.manifest.text2text is None and not read_generation_defaults(bundle)
    if options.applies_generation_defaults and is_bare:
        rule = "the bundle has none; export it again if its checkpoint has a generation_config.json that asks for some"
        raise ConfigError("generation_defaults", rule)
    try:
        config, line = with_bundle_defaults(
            options.config,
            bundle.manifest.serving,
            leaves_drafter=options.leaves_drafter,
            leaves_gamma=options.leaves_gamma,
        )
    except ConfigError as error:
        raise BundleError(f"{MANIFEST_FILE}: serving: {error}") from error
    if line is not None:
        log.info("serving with %s", line)
    elif options.leaves_drafter and config.default_gamma is None:
        config = replace(config, default_drafter=AUTO)
    choice = choose_device(options.device, bundle)
    log.info("serving on %s: %s", choice.device, choice.reason)
    if choice.device.kind == CPU:
        log.info("%d threads compute", threads_of(options.config.num_threads))
    return replace(options, device=str(choice.device), config=config)


def with_bundle_defaults(
    config: ServerConfig,
    defaults: ServingDefaults | None,
    *,
    leaves_drafter: bool,
    leaves_gamma: bool,
) -> tuple[ServerConfig, str | None]:
    """Return the settings to serve with, and a line that names those of the bundle; None where there are none.

    A gamma was found for its drafter, so it is taken only with that drafter.
    ``leaves_drafter`` and ``leaves_gamma`` say what the bundle may choose.

    Raises:
        ConfigError: a default of the bundle is out of range.
    """
    taken = []
    if defaults is not None and leaves_drafter:
        defaults = replace(defaults, drafter=tuned_drafter(defaults.drafter))
        config = replace(config, default_drafter=defaults.drafter)
        taken.append(f"drafter {defaults.drafter}")
    if defaults is None or config.default_drafter != defaults.drafter:
        return config, None
    if leaves_gamma:
        config = replace(config, default_gamma=defaults.gamma)
        taken.append(f"gamma {'auto' if defaults.gamma is None else defaults.gamma}")
    # The window is the target's with lookahead, else the draft model's.
    window = "window" if "lookahead" in defaults.drafter else "draft_window"
    for name in ("phrase_length", "num_phrases", "window"):
        if (value := getattr(defaults, name)) is not None:
            setting = {window if name == "window" else name: value}
            config = replace(config, drafting=replace(config.drafting, **setting))
            taken.append(f"{name} {value}")
    line = f"{', '.join(taken)}: the bundle's serving defaults ({defaults.source})"
    return config, line if taken else None


def bundle_costs(
    bundle: Bundle,
    options: ServeOptions,
    engines: Callable[[], AbstractContextManager[Pair]],
    decoder: Decoder,
    max_batch: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Return what steps of a bundle cost here: the kept table, or one measured on ``engines`` that serve nobody yet.

    Engines are timed with their logits copied to the host, also where rounds stay on the device.
    """
    manifest, root = bundle.manifest, bundle.root.resolve()
    folders = [options.costs_folder]
    if options.costs_folder is None:
        folders = [root.with_name(f"{root.name}.costs"), Path.home() / ".cache" / "outrider"]

    def measure() -> CostTable:
        with options.stage("measuring what steps cost on this machine"), engines() as pair:
            move_to_huge_pages()
            table = calibrate(
                target=pair.target,
                draft=pair.draft,
                sampler=pair.sampler,
                decoder=decoder,
                max_gamma=manifest.max_gamma,
                clock=clock,
            )
            # Caches give back at once what the longest calls took.
            for engine in PATIENCE * [pair.target] + PATIENCE * [pair.draft]:
                if engine is not None:
                    engine.trim(())
            return table

    name = table_name(
        files=[entry.sha256 for entry in manifest.files.values()],
        device=_place_name(options),
        num_threads=threads_of(options.config.num_threads),
        max_batch=max_batch,
    )
    paths = [folder / name for folder in folders if folder is not None]
    return load_or_measure(
        paths,
        measure,
        is_refreshed=options.refreshes_costs,
    )


def open_engines(bundle: Bundle, options: ServeOptions, max_batch: int) -> Pair:
    """Return target, draft and sampler of a bundle, with trees where a drafter proposes them."""
    return open_pair(
        bundle,
        device=options.device,
        sampler=options.config.sampler,
        num_threads=options.config.num_threads,
        max_batch=max_batch,
        with_trees=_wants_trees(options),
        provider_options=dict(options.config.provider_options),
    )


def _wants_trees(options: ServeOptions) -> bool:
    """Return whether trees are to be verified: where the server's own drafter makes some.

    Their graphs hold the weights once more. Without them requests get chains from drafters that propose trees.
    """
    return any_proposes_trees(re.split("[+/:]", options.config.default_drafter))


def settle_loaded(*, waits: bool = False) -> None:
    """Take all loaded objects out of garbage collection, and move them to huge pages: behind what is served or at once.

    Libraries bring some hundred thousand objects; looking through them took an eighth of the host's time.
    """
    gc.collect()
    gc.freeze()
    if waits:
        move_to_huge_pages()
    else:
        threading.Thread(target=_move_behind, name="huge pages", daemon=True).start()


def _move_behind() -> None:
    with suppress(OSError):  # where threads have no priorities of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
    move_to_huge_pages()


def move_to_huge_pages() -> None:
    """Give back what libraries have freed, and move what is left to huge pages where there are any."""
    if give_back := trimmer():
        give_back()
    use_everywhere()


def _place_name(options: ServeOptions) -> str:
    """Return the device and its settings, on which costs depend beside the bundle."""
    config = options.config
    settings = [f"{key}={value}" for key, value in sorted(config.provider_options)]
    sampler = ["sampler"] if config.sampler == "device" else []
    return "-".join([options.device, *sampler, *settings])
