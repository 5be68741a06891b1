"""Certificates: the distance of a bundle's graphs from the checkpoints they were made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import DEVICE_FILE, GROUPED_FILE, MODEL_FILE, RINGS_FILE
from outrider.export.certificate.parity import (
    Bound,
    check_parity,
    check_rounding,
    float32_bound,
    prepare_parity,
)
from outrider.export.certificate.parity_cases import parity_cases
from outrider.export.certificate.reference import Reference
from outrider.export.certificate.tree_parity import (
    TREE_FILES,
    check_tree_parity,
    prepare_tree_parity,
)
from outrider.export.checkpoint import open_checkpoint
from outrider.export.gguf.folder import KEPT_KINDS
from outrider.export.model_config import ModelConfig
from outrider.export.progress import Steps, untold
from outrider.export.weights.blocks import BITS
from outrider.export.weights.half_weights import HALF_TYPES
from transformers import PreTrainedModel

CHAIN_FILES = (MODEL_FILE, GROUPED_FILE, RINGS_FILE, DEVICE_FILE)
"""Graphs that a certificate compares; trees are beside the first and the last."""
OTHER_TOKENS = "other_tokens"
"""Key of a draft's certificate where its tokenizer is not the target's: shares of tokens that both have."""
# Other weights than float32 differ by what storing them costs; another version's kernels add little to that.
_MOST_FARTHER = 1.5


def prepare(
    model: PreTrainedModel,
    model_config: ModelConfig,
    *,
    max_gamma: int,
    max_tree_nodes: int,
    load: Callable[[], PreTrainedModel] | None = None,
    report: Steps = untold,
) -> Reference:
    """Return all of a model that ``certify`` with these sizes, and ``float32_bound``, ask for.

    It lets the model go where ``load`` returns it again, for a graph beyond the bound. ``report`` is told of the cases
    that PyTorch has answered.

    Raises:
        BundleError: the model's logits are not numbers.
    """
    reference = Reference(model, load)
    # Refuses what is not a number before all else.
    float32_bound(reference, model_config, max_gamma=max_gamma)
    prepare_parity(reference, model_config, max_gamma=max_gamma, report=report)
    if max_tree_nodes:
        prepare_tree_parity(reference, model_config, max_tree_nodes=max_tree_nodes)
    reference.release()
    return reference


def certify(
    model: PreTrainedModel | Reference,
    path: Path,
    model_config: ModelConfig,
    *,
    max_gamma: int,
    max_tree_nodes: int,
    bound: Bound | None,
    graphs: Collection[str] = CHAIN_FILES,
    report: Steps = untold,
) -> dict[str, object]:
    """Return the certificate of a canonical graph and of those ``graphs`` beside it that there are.

    The model is the reference. Without a bound differences are recorded and not judged; without tree
    graphs ``max_tree_nodes`` is 0. ``report`` is told of the cases that were compared.

    Raises:
        BundleError: a case lies beyond the bound, or is not a number.
    """
    paths = [one for one in map(path.with_name, graphs) if one.exists()]
    num_cases = len(paths) * len(parity_cases(model_config, max_gamma, seed=0))
    counter = itertools.count(1)

    def judge(graph: Path) -> dict[str, object]:
        found = dict(
            check_parity(
                model,
                graph,
                model_config,
                max_gamma=max_gamma,
                bound=bound,
                compared=lambda: report(next(counter), num_cases),
            )
        )
        if max_tree_nodes and graph.name in TREE_FILES:
            found |= check_tree_parity(
                model, graph, model_config, max_tree_nodes=max_tree_nodes, bound=bound
            )
        return found

    certificate = {one.stem: judge(one) for one in paths}
    own = certificate.pop(path.stem, {})
    return own | certificate


def _refuse_once_compared(name: str, entry: ModelEntry, certificate: object) -> None:
    """Refuse a model that can be compared with its checkpoint while it is exported alone."""
    if entry.reads_features:
        raise BundleError(f"{name}: a head is compared when it is exported; export it again")
    if isinstance(certificate, Mapping) and OTHER_TOKENS in certificate:
        raise BundleError(
            f"{name}: its graphs take the target's ids, and were compared before they did; export it again"
        )


def certify_bundle(bundle: Bundle, checkpoints: Mapping[str, Path]) -> dict[str, dict[str, object]]:
    """Return the certificate by part of a bundle, made again.

    ``checkpoints`` are folders by "target" and "draft". Weights that are not float32 differ from the checkpoint's by
    design: they may be as far from it as when the bundle was made.

    Raises:
        BundleError: the bundle has no such part, a folder is no such checkpoint, or a graph is too far from it.
    """
    manifest = bundle.manifest
    parts = {"target": manifest.target, "draft": manifest.draft}
    certificate = {}
    for name, path in checkpoints.items():
        entry = parts[name]
        if entry is None:
            raise BundleError(f"the bundle has no {name} model to compare with a checkpoint")
        _refuse_once_compared(name, entry, manifest.certificate.get(name))
        checkpoint = open_checkpoint(
            path,
            max_context=manifest.max_context,
            max_source=entry.source.max_source if entry.source else None,
        )
        if entry.gives_features:
            checkpoint = checkpoint.with_features(entry.gives_features)
        model_config = checkpoint.model_config
        _refuse_other_sizes(name, model_config, entry)
        if entry.rings is not None:
            model_config = replace(model_config, ring_columns=entry.rings.columns)
        reference, max_gamma = Reference(checkpoint.load()), manifest.max_gamma
        exact = float32_bound(
            reference,
            model_config,
            max_gamma=max_gamma,
            accepted=manifest.accepted_parity(entry.path),
        )
        bound = exact if entry.weights == "float32" else None
        certificate[name] = certify(
            reference,
            bundle.model_path(entry),
            model_config,
            max_gamma=max_gamma,
            max_tree_nodes=entry.max_tree_nodes,
            bound=bound,
        )
        has_blocks = entry.weights in BITS or entry.weights in KEPT_KINDS
        if has_blocks and entry.device_precision in HALF_TYPES:
            certificate[name]["device_rounding"] = check_rounding(
                bundle.model_path(entry),
                model_config,
                max_gamma=max_gamma,
                bound=None,
            )
        if bound is None:
            recorded = manifest.certificate.get(name)
            _refuse_farther(name, certificate[name], recorded, entry.weights, exact)
    return certificate


def most_different(part: Mapping[str, object]) -> float:
    """Return the worst logit difference of all cases of a certificate's part."""
    return max(_number(case, "max_difference") for _, case in _cases(part))


def verdict(certificate: Mapping[str, Mapping[str, object]]) -> str:
    """Return what a certificate says, in a line."""
    parts = []
    for name, part in certificate.items():
        cases = [case for _, case in _cases(part)]
        worst = most_different(part)
        equal = sum(_number(case, "num_greedy_equal") for case in cases)
        compared = sum(_number(case, "num_compared") for case in cases)
        parts.append(
            f"{name}: logits within {worst:.2g} of the checkpoint's, {equal:.0f} of {compared:.0f} greedy choices equal"
        )
    return f"parity holds; {'; '.join(parts)}"


def _refuse_other_sizes(name: str, model_config: ModelConfig, entry: ModelEntry) -> None:
    sizes = [
        (field, getattr(model_config, field), getattr(entry, field))
        for field in ("num_layers", "num_kv_heads", "head_size", "caches", "vocab_size")
    ]
    # None on the side that has no encoder.
    sizes += [
        (
            f"source.{field}",
            getattr(model_config.source, field, None),
            getattr(entry.source, field, None),
        )
        for field in ("num_heads", "head_size", "vocab_size", "hidden_size")
    ]
    for field, theirs, ours in sizes:
        if theirs != ours:
            raise BundleError(
                f"{name}: {field} of this checkpoint is {theirs}, of the bundle's {ours}: "
                "the bundle was made from another one"
            )


def _refuse_farther(
    name: str, found: Mapping[str, object], recorded: object, weights: str, exact: Bound
) -> None:
    """Refuse cases that lie farther from a checkpoint than when the bundle was made, other kernels aside.

    Those may add as much as a float32 graph may differ by, ``exact``.

    ``recorded`` is what the manifest says of the part; its cases of these weights count, where it has such.
    """
    of_weights = recorded.get(weights, recorded) if isinstance(recorded, Mapping) else {}
    then = dict(_cases(of_weights)) if isinstance(of_weights, Mapping) else {}
    compared = [(case, values) for case, values in _cases(found) if case in then]
    if not compared:
        raise BundleError(
            f"{name}: the manifest's certificate has no cases to compare with; export the bundle again"
        )
    for case, values in compared:
        now, before = (_number(one, "max_difference") for one in (values, then[case]))
        if not now <= _MOST_FARTHER * before + exact.of(0.0):
            raise BundleError(
                f"{name}: case {case} differs by {now:.3g} from this checkpoint, by {before:.3g} from the one that the "
                "bundle was made from: it is another one, or the graph is broken"
            )


def _cases(
    part: Mapping[str, object], path: str = ""
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the cases of a certificate's part with their names, graphs beside the canonical one included."""
    for name, value in part.items():
        if isinstance(value, Mapping):
            if isinstance(value.get("max_difference"), (int, float)):
                yield f"{path}{name}", value
            else:
                yield from _cases(value, f"{path}{name}.")


def _number(case: Mapping[str, object], name: str) -> float:
    value = case.get(name)
    if not isinstance(value, (int, float)):
        raise BundleError(f"certificate: field {name!r} must be a number")
    return value
