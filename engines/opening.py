"""Opens a bundle's models and sampler: the CPU's here, an accelerator's by the backend of its add-on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module

from outrider.engines.addons import NotInstalledError
from outrider.engines.backends import Backend, EngineOptions, Which, load_backend
from outrider.engines.base import BundleError, Engine, EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.determinism import BitEquality, has_equal_bits
from outrider.engines.devices import CPU, PREFERENCE, Choice, Device, choose, parse_device
from outrider.engines.heads import HeadEngine
from outrider.engines.pair import DEVICE, Pair, choose_place, open_on_host


def open_engine(
    bundle: Bundle,
    which: Which,
    *,
    device: str = "cpu",
    num_threads: int = 0,
    max_batch: int | None = None,
    with_trees: bool = False,
    provider_options: Mapping[str, str] | None = None,
    beside: Engine | None = None,
) -> Engine:
    """One model of a bundle, ready to extend.

    Args:
        bundle: from ``load_bundle``.
        which: which of its models.
        device: "cpu", "cuda[:N]", "tensorrt[:N]" or "auto".
        num_threads: of the pool that all engines of the process share; 0: as many as there are physical cores.
        max_batch: slots; None for all the bundle allows.
        with_trees: load the graphs that verify trees too, where bundle and backend have them.
        provider_options: of ONNX Runtime's CUDA provider, as it documents them.
        beside: the bundle's target, which a draft that shares its encoder, or reads its features, serves with; None
            for a draft alone, which has its own encoder.

    Raises:
        BundleError: the bundle has no such model, or its graph does not fit the manifest.
        EngineError: the backend cannot load it, or there is none for the device.
    """
    options = EngineOptions(
        num_threads=num_threads,
        max_batch=max_batch,
        with_trees=with_trees,
        provider_options=provider_options or {},
    )
    engine = _open_one(bundle, which, parse_or_choose(device, bundle), options, beside)
    with ExitStack() as undo:
        undo.callback(engine.close)
        bundle.take_mapped()
        undo.pop_all()
    return engine


def _open_one(
    bundle: Bundle, which: Which, chosen: Device, options: EngineOptions, beside: Engine | None
) -> Engine:
    entry = bundle.manifest.target if which == "target" else bundle.manifest.draft
    if entry is None:
        raise BundleError("the bundle has no draft model")
    engine: Engine
    if chosen.kind == CPU:
        from outrider.engines.onnx.engine import OnnxEngine

        assert beside is None or isinstance(beside, OnnxEngine), "a target on the same device"
        if entry.reads_features and beside is None:
            raise BundleError(
                "draft: a head reads its target's features; open it beside the target"
            )
        engine = OnnxEngine(
            bundle,
            entry,
            num_threads=options.num_threads,
            max_batch=options.max_batch,
            with_trees=options.with_trees,
            beside=beside,
        )
        if entry.reads_features and beside is not None:
            engine = HeadEngine(engine, beside)
    else:
        engine = _backend(chosen).open_engine(bundle, entry, which, chosen.index, options)
    return engine


def open_pair(
    bundle: Bundle,
    *,
    device: str = "cpu",
    sampler: str = "auto",
    num_threads: int = 0,
    max_batch: int | None = None,
    with_trees: bool = False,
    provider_options: Mapping[str, str] | None = None,
) -> Pair:
    """The models of a bundle and their sampler, ready to serve.

    The sampler is "host", "device", or "auto": the device, where it is an accelerator. All else is as
    ``open_engine`` takes it.

    Raises:
        BundleError: a graph does not fit the manifest, or the bundle lacks what was asked for.
        EngineError: the backend cannot load it, or the sampler cannot be where it was asked for.
    """
    chosen = parse_or_choose(device, bundle)
    if provider_options and chosen.kind == CPU:
        raise EngineError(
            f"provider option {min(provider_options)}: device {chosen} has no such provider"
        )
    options = EngineOptions(
        num_threads=num_threads,
        max_batch=max_batch or bundle.manifest.max_batch,
        with_trees=with_trees,
        provider_options=provider_options or {},
    )
    is_accelerator = chosen.kind != CPU
    # On the CPU rounds stay with the host's own sampler unless the device is asked for: nothing is looked up then.
    missing = _why_no_sampler(bundle, chosen) if is_accelerator or sampler == DEVICE else ""
    place, reason = choose_place(sampler, is_accelerator=is_accelerator, missing=missing)
    if place != DEVICE:
        return _open_apart(bundle, chosen, options, reason)
    pair = _backend(chosen).open_pair(bundle, chosen.index, options, reason=reason)
    with ExitStack() as undo:
        undo.callback(pair.close)
        bundle.take_mapped()
        undo.pop_all()
    return pair


def _open_apart(bundle: Bundle, chosen: Device, options: EngineOptions, reason: str) -> Pair:
    """Open engines whose logits the host reads, and the host's sampler."""
    entry, draft, aside = bundle.manifest.draft, None, None
    if chosen.kind == CPU:
        # Before two threads do: where a package is missing, the later one finds half a module and another error.
        import_module("outrider.engines.onnx.engine")
    with ExitStack() as undo:
        # Beside one another where they can: each takes seconds, of one core for the most part.
        with ThreadPoolExecutor(1) as pool:
            if entry is not None and chosen.kind == CPU and _opens_alone(entry):
                aside = pool.submit(_open_one, bundle, "draft", chosen, options, None)
                undo.callback(_close_opened, aside)
            target = _open_one(bundle, "target", chosen, options, None)
            undo.callback(target.close)
        if aside is not None:
            draft = aside.result()
        elif entry is not None:
            draft = _open_one(bundle, "draft", chosen, options, target)
            undo.callback(draft.close)
        bundle.take_mapped()
        max_batch = options.max_batch or bundle.manifest.max_batch
        pair = open_on_host(target, draft, bundle, max_batch, reason)
        undo.pop_all()
    return pair


def _opens_alone(entry: ModelEntry) -> bool:
    """Return whether a draft takes nothing of its target's engine."""
    return not entry.reads_features and (entry.source is None or not entry.source.shares_encoder)


def _close_opened(opening: Future[Engine]) -> None:
    with suppress(Exception):  # who waits for it was told
        opening.result().close()


def judge_bits(bundle: Bundle, pair: Pair) -> tuple[BitEquality, str]:
    """Return what is known of the claim that a row's bits depend on nothing beside it, and what was compared.

    Where ONNX Runtime is not the version that the bundle's certificate was made with, a few dozen passes of each model
    decide; the second value is empty where nothing had to be compared.
    """
    engines = [engine for engine in (pair.target, pair.draft) if engine is not None]
    if not all(engine.is_row_invariant for engine in engines):
        return BitEquality.NOT_CLAIMED, ""
    from outrider.engines.onnx.session import LIBRARY_VERSION

    certified = bundle.manifest.versions.get("onnxruntime", "of an unknown version")
    if certified == LIBRARY_VERSION:
        return BitEquality.CERTIFIED, ""
    line = (
        f"onnxruntime is {LIBRARY_VERSION}, the bundle was certified with {certified}: a row's bits"
    )
    if all(has_equal_bits(engine) for engine in engines):
        return BitEquality.CONFIRMED, f"{line} were compared and are the same in all shapes"
    return (
        BitEquality.WITHDRAWN,
        f"{line} differ between shapes; answers keep their distributions, but greedy and seed_stable ones may depend "
        "on what runs beside them",
    )


def choose_device(text: str, bundle: Bundle) -> Choice:
    """The device that will serve a bundle, and why.

    Args:
        text: as ``open_engine`` takes it.
        bundle: whose plans TensorRT would need.

    Raises:
        EngineError: it is no device, or the one asked for cannot serve this bundle.
    """

    def why_not(kind: str, index: int) -> str:
        try:
            return load_backend(kind).why_not(bundle, index)
        except NotInstalledError as error:
            return error.rule

    return choose(text, {kind: partial(why_not, kind) for kind in PREFERENCE})


def parse_or_choose(text: str, bundle: Bundle) -> Device:
    """The device asked for, without a look whether it is there, or the best that is.

    Raises:
        EngineError: it is no device.
    """
    asked = parse_device(text)
    return choose_device(text, bundle).device if asked is None else asked


def _backend(chosen: Device) -> Backend:
    try:
        return load_backend(chosen.kind)
    except NotInstalledError as error:
        raise EngineError(f"device {chosen}: {error.rule}") from error


def _why_no_sampler(bundle: Bundle, chosen: Device) -> str:
    try:
        return load_backend(chosen.kind).why_no_sampler(bundle, chosen.index)
    except NotInstalledError as error:
        return error.rule
