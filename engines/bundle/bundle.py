"""A bundle: the exported directory, and how it is checked.

Layout: ``manifest.json``, ``tokenizer.json``, ``target/model.onnx`` with ``model.onnx.data`` beside it,
``grouped.onnx`` over the same data where rows can be packed, blocks of integers in a file of its own, ``tree.onnx``
over both and ``keep_path.onnx`` where trees are verified, ``device.onnx``, ``device_tree.onnx`` and
``device_keep_path.onnx`` likewise for ONNX Runtime's CUDA provider, and ``draft/`` in the same way; TensorRT plans
under ``plans/``. The manifest lists every other file with its size and SHA-256; a file that is missing, changed,
unlisted or reached over a link is refused. Only under ``plans/`` an unlisted file is merely never read: a build that
was killed leaves one behind. ``manifest.sig`` says who vouches for the manifest, if anybody does. Knows no inference
library.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from outrider.engines.base import BundleError, EngineLimits
from outrider.engines.bundle.encoder_decoder import (
    CROSS_FILE,
    DEVICE_ENCODE_FILE,
    ENCODE_FILE,
    SOURCE_TOKENIZER_FILE,
)
from outrider.engines.bundle.files import (
    MANIFEST_FILE,
    FileStamp,
    changed,
    check_file,
    check_inside,
    check_size,
    check_stamp,
    list_files,
    read_file,
    read_plain,
    stamp_file,
)
from outrider.engines.bundle.limits import check_tables
from outrider.engines.bundle.manifest import BFLOAT16, W8A8, Manifest, ModelEntry
from outrider.engines.bundle.manifest_rules import check_manifest
from outrider.engines.bundle.mapped_files import can_tell, still_mapped, take_mapped
from outrider.engines.bundle.names import (
    DEVICE_FILE,
    DEVICE_FILES,
    GROUPED_FILE,
    KEEP_PATH_FILE,
    MODEL_FILE,
    RINGS_FILE,
    TREE_FILE,
    WEIGHTS_SUFFIX,
)
from outrider.engines.bundle.onnx_files import external_data_paths
from outrider.engines.bundle.plans import PLANS_FOLDER
from outrider.engines.bundle.signatures import check_signature

# Ampere's, the first GPUs that multiply in it.
_LEAST_OF_BFLOAT16 = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A verified bundle: every file of ``manifest.files`` but the plans lay under ``root`` as declared.

    Attributes:
        root: folder.
        manifest: of it.
        signer: fingerprint of who vouches for the manifest; empty where nobody was asked.
        stamps: of the files whose content was found to be the declared one; ``read`` adds to them.
        unhashed: of weights that ``check_weights`` is still to hash.
    """

    root: Path
    manifest: Manifest
    signer: str = ""
    stamps: dict[str, FileStamp] = field(default_factory=dict)
    unhashed: dict[str, FileStamp] = field(default_factory=dict)

    def read(self, name: str) -> bytes:
        """Return the content of a file, which is hashed unless that was done before.

        Raises:
            BundleError: the manifest does not hold its hash, or it is another one.
        """
        declared = self.manifest.files.get(name)
        if declared is None:
            raise BundleError(f"{name}: not listed in {MANIFEST_FILE}")
        data, self.stamps[name] = read_file(self.root, name, declared, self.stamps.get(name))
        return data

    def check_weights(self) -> None:
        """Hash the weights that ``load_bundle`` was told to leave for later; from any thread, beside opening engines.

        Raises:
            BundleError: naming the file: another content, or written to since the bundle was loaded.
        """
        for name, stamp in self.unhashed.items():
            if check_file(self.root, name, self.manifest.files[name]) != stamp:
                raise changed(name)

    def check_plans(self) -> None:
        """Hash what ``load_bundle`` does not.

        Raises:
            BundleError: naming the file.
        """
        for name, declared in self.manifest.files.items():
            if name not in self.stamps:
                self.stamps[name] = check_file(self.root, name, declared)

    def check_unchanged(self) -> None:
        """Refuse a bundle whose files were written to, moved or replaced since they were hashed.

        Libraries open graphs and weights by their paths: this is how what they opened is what was hashed. What goes
        through ``read`` does not need it: plans and the tokenizer.

        Raises:
            BundleError: naming the file.
        """
        models = (self.manifest.target, self.manifest.draft)
        folders = [model.path for model in models if model is not None]
        for name, stamp in [*self.stamps.items(), *self.unhashed.items()]:
            if any(PurePosixPath(name).is_relative_to(folder) for folder in folders):
                check_stamp(self.root, name, stamp)

    def take_mapped(self) -> int:
        """Move the weights that engines have mapped into private memory; return the bytes that stay mapped.

        Raises:
            BundleError: as ``check_unchanged``.
        """
        left = take_mapped(self._paths())
        self.check_unchanged()
        return left

    def is_mapped(self) -> bool:
        """Return whether engines may compute from files: memory was too small, or the system does not say."""
        return not can_tell() or bool(still_mapped(self._paths()))

    def _paths(self) -> list[Path]:
        return [self.root / name for name in (*self.stamps, *self.unhashed)]

    def model_path(self, entry: ModelEntry) -> Path:
        """Graph file of one of the bundle's models."""
        return self.root / entry.path / MODEL_FILE

    def host_path(self, entry: ModelEntry) -> Path:
        """Graph file of one of the bundle's models that suits a CPU best: the same function."""
        for name in (GROUPED_FILE, RINGS_FILE):
            if f"{entry.path}/{name}" in self.manifest.files:
                return self.root / entry.path / name
        return self.model_path(entry)

    def encode_path(self, entry: ModelEntry) -> Path:
        """Graph file that reads sources for one of the bundle's models, where it has an encoder."""
        return self.root / entry.path / ENCODE_FILE

    def cross_path(self, entry: ModelEntry) -> Path:
        """Graph file that reads what the target's encoder answered, where the model ``shares_encoder``."""
        return self.root / entry.path / CROSS_FILE

    def tree_path(self, entry: ModelEntry) -> Path:
        """Graph file that verifies trees with one of the bundle's models, if it has one."""
        return self.root / entry.path / TREE_FILE

    def keep_path_path(self, entry: ModelEntry) -> Path:
        """Graph file that moves the kept path of a tree into place, where ``tree_path`` exists."""
        return self.root / entry.path / KEEP_PATH_FILE

    def why_no_device(self, entry: ModelEntry, capability: str) -> str:
        """Say why ONNX Runtime's CUDA provider serves none of a model's graphs; empty where it does.

        ``capability`` is the GPU's compute capability, such as "8.0"; empty for a host that runs the same graphs.
        """
        if entry.device_precision == BFLOAT16:
            if not capability:
                return f"{entry.path}: {BFLOAT16} is for GPUs, ONNX Runtime's CPU provider has no products of it"
            if int(capability.split(".")[0]) < _LEAST_OF_BFLOAT16:
                return (
                    f"{entry.path}: {BFLOAT16} needs compute capability {_LEAST_OF_BFLOAT16}.0, this GPU has "
                    f"{capability}; export with --weights float16"
                )
        if entry.device_precision:
            return ""
        if entry.weights == W8A8:
            return (
                f"{entry.path}: on CUDA {W8A8} is slower than float32; serve it on the CPU or from TensorRT "
                "plans, or export other weights"
            )
        if reason := self.manifest.no_device(entry.path):
            return f"{entry.path}: {reason}; serve it on the CPU"
        return f"{entry.path}: no {DEVICE_FILE}; export the bundle again"

    def limits(
        self, entry: ModelEntry, max_batch: int | None = None, *, with_trees: bool = False
    ) -> EngineLimits:
        """Return the limits of an engine over one of the models; its slots default to all allowed.

        Raises:
            BundleError: the bundle does not allow so many slots.
        """
        most = self.manifest.max_batch
        if max_batch is not None and not 1 <= max_batch <= most:
            raise BundleError(f"max_batch {max_batch}: the bundle allows 1..{most}")
        return EngineLimits(
            max_batch=max_batch or most,
            max_context=self.manifest.max_context,
            max_extend=self.manifest.max_extend,
            vocab_size=entry.vocab_size,
            max_tree_nodes=entry.max_tree_nodes if with_trees else 0,
            max_source=0 if entry.source is None else entry.source.max_source,
            max_open=_max_open(entry, self.manifest.max_extend),
            parallel_token=entry.parallel_token,
            reads_features=entry.reads_features,
        )


def _max_open(entry: ModelEntry, max_extend: int) -> int | None:
    if entry.rings is not None:
        return entry.rings.max_open(max_extend)
    return None if entry.states is None else entry.states.max_open


def load_bundle(
    root: Path, signers: Sequence[bytes] = (), *, hashes_weights: bool = True
) -> Bundle:
    """Bundle at ``root`` after checking every file against the manifest.

    Of plans only the size is checked here: ``Bundle.read`` hashes one when it is loaded.

    Args:
        root: folder.
        signers: public keys (``read_signers``), of which one must vouch for the manifest; none: nobody has to.
        hashes_weights: False leaves files of weights, numbers that nobody parses, to ``Bundle.check_weights``, which
            must have returned before anything is served; graphs are always hashed.

    Raises:
        BundleError: naming the file: missing, unlisted, of another size or hash, a symbolic or
            hard link, outside the folder, or a graph whose weights lie outside it; or no signer vouches.
    """
    # The system names what is mapped by paths without links and "..".
    root = Path(os.path.realpath(root))
    if not root.is_dir():
        raise BundleError(f"{root}: no such bundle folder")
    names = list_files(root)
    if not (root / MANIFEST_FILE).is_file():
        raise BundleError(f"{root}: {MANIFEST_FILE} is missing")
    # Read once: what a signer vouches for is what is parsed.
    text = read_plain(root, MANIFEST_FILE)
    signer = check_signature(root, text, signers) if signers else ""
    try:
        manifest = Manifest.from_json(text.decode())
    except UnicodeDecodeError as error:
        raise BundleError(f"{MANIFEST_FILE}: not UTF-8") from error
    check_manifest(manifest)
    for name in manifest.files:
        check_inside(name)
    _check_listing(names, manifest)
    stamps, unhashed = dict[str, FileStamp](), dict[str, FileStamp]()
    for name, declared in manifest.files.items():
        if name.startswith(f"{PLANS_FOLDER}/"):
            check_size(name, (root / name).stat().st_size, declared)
        elif name.endswith(WEIGHTS_SUFFIX) and not hashes_weights:
            unhashed[name] = stamp_file(root, name, declared)
        else:
            stamps[name] = check_file(root, name, declared)
    for entry in (manifest.target, manifest.draft):
        if entry is not None:
            _check_model(root, entry, manifest)
    return Bundle(root=root, manifest=manifest, signer=signer, stamps=stamps, unhashed=unhashed)


def _check_listing(names: list[str], manifest: Manifest) -> None:
    found = set(names)
    for name in manifest.files:
        if name not in found:
            raise BundleError(f"{name}: listed in {MANIFEST_FILE} but missing")
    for name in _tokenizers(manifest):
        if name not in manifest.files:
            raise BundleError(
                f"{MANIFEST_FILE}: sources have a tokenizer of their own, but {name} is not in files"
            )
    for plan in manifest.plans:
        if plan.path not in manifest.files:
            raise BundleError(
                f"{MANIFEST_FILE}: plans: {plan.path!r}: a plan without a hash in files"
            )
    for name in names:
        if name not in manifest.files and not name.startswith(f"{PLANS_FOLDER}/"):
            raise BundleError(f"{name}: not listed in {MANIFEST_FILE}")


def _tokenizers(manifest: Manifest) -> list[str]:
    text2text = manifest.text2text
    return [SOURCE_TOKENIZER_FILE] if text2text and text2text.has_source_tokenizer else []


def _check_model(root: Path, entry: ModelEntry, manifest: Manifest) -> None:
    check_inside(entry.path)
    folder = PurePosixPath(entry.path)
    graphs = [MODEL_FILE]
    own = [one for one in (GROUPED_FILE, RINGS_FILE) if (folder / one).as_posix() in manifest.files]
    if entry.rings is not None and not own:
        raise BundleError(f"{folder}: a model with rings has {GROUPED_FILE} or {RINGS_FILE}")
    graphs += own
    if entry.source is not None:
        graphs += [ENCODE_FILE, CROSS_FILE] if entry.source.shares_encoder else [ENCODE_FILE]
    if entry.max_tree_nodes:
        graphs += [TREE_FILE, KEEP_PATH_FILE]
    if entry.device_precision:
        graphs += DEVICE_FILES if entry.max_tree_nodes else [DEVICE_FILE]
        graphs += [DEVICE_ENCODE_FILE] if entry.source is not None else []
    for name in graphs:
        _check_graph_file(root, folder / name, manifest)
    limits = {MODEL_FILE: ("max_context", manifest.max_context)}
    if entry.source is not None:
        limits[ENCODE_FILE] = ("max_source", entry.source.max_source)
    for name, limit in limits.items():
        graph = folder / name
        check_tables(root / graph, graph.as_posix(), limit)


def _check_graph_file(root: Path, graph: PurePosixPath, manifest: Manifest) -> None:
    if graph.as_posix() not in manifest.files:
        raise BundleError(f"{graph}: the graph of a model is missing, its path is of no file")
    for location in external_data_paths(root / graph):
        name = (graph.parent / location).as_posix()
        check_inside(name)
        if name not in manifest.files:
            raise BundleError(f"{graph}: weights at {location!r}, not a file of the bundle")
