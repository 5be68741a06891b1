"""A tiny checkpoint pair and its exported bundle, made once per session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
from filelock import FileLock
from hypothesis import settings
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.onnx.session import open_session

from scripts.gpu.stubs.environment import NoEnvironmentError, make_environment, variables
from tests.environments import environments

__all__ = ["environments"]

# The same examples in every run, and no deadline: a busy machine must not fail a test.
settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="also what takes minutes or environments of its own"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give ONNX Runtime's pool, which reads no variable, the one thread that ``OMP_NUM_THREADS`` allows the others."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        set_sizes = onnxruntime.set_global_thread_pool_sizes
        onnxruntime.set_global_thread_pool_sizes = lambda asked, between: set_sizes(1, between)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(
                    pytest.mark.skip(reason="takes minutes or an environment of its own: --long")
                )


VOCAB_SIZE = 512
CORPUS = (
    "the quick brown fox jumps over the lazy dog and runs away from the small grey cat",
    "once upon a time there was a little house by the sea where nobody ever slept",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
    "Grüße aus Köln! naïve café 東京 🚀",
)


def write_tokenizer(folder: Path, *, vocab_size: int = VOCAB_SIZE) -> None:
    """Train a byte-level BPE of at most ``vocab_size`` ids into ``folder``/tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_llama(folder: Path, *, num_layers: int, hidden_size: int, seed: int) -> None:
    """Save a random Llama with a vocabulary of ``VOCAB_SIZE`` and 2 KV heads to ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)


MakeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MakeOnce:
    """Makes a folder once for both processes of this run: by its name, and what fills it. Nobody may change it."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made"
    root.mkdir(exist_ok=True)

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder, partial = root / name, root / f"{name}.partial"
        with FileLock(root / f"{name}.lock"):
            if not folder.exists():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                make(partial)
                partial.rename(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def tiny_checkpoints(made_once: MakeOnce) -> tuple[Path, Path]:
    """Folders of a random target and a smaller random draft with one tokenizer."""

    def write(root: Path) -> None:
        write_llama(root / "target", num_layers=2, hidden_size=64, seed=1)
        write_llama(root / "draft", num_layers=1, hidden_size=32, seed=2)

    root = made_once("checkpoints", write)
    return root / "target", root / "draft"


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoints: tuple[Path, Path], made_once: MakeOnce) -> Path:
    """Folder of the bundle exported from ``tiny_checkpoints``, float32, 256 tokens of context."""
    from outrider.export.pipeline import ExportOptions, export_bundle

    def export(root: Path) -> None:
        export_bundle(
            target=tiny_checkpoints[0],
            draft=tiny_checkpoints[1],
            out=root / "tiny",
            options=ExportOptions(max_context=256, max_batch=4, max_gamma=8),
            progress=lambda stage: None,
        )

    return made_once("bundle", export) / "tiny"


def write_t5(folder: Path, *, num_layers: int, hidden_size: int, seed: int) -> None:
    """Save a random T5 of one shape for encoder and decoder, with a vocabulary of ``VOCAB_SIZE``, to ``folder``."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=hidden_size,
        d_kv=8,
        d_ff=2 * hidden_size,
        num_layers=num_layers,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    write_tokenizer(folder)


@pytest.fixture(scope="session")
def tiny_text2text_checkpoints(made_once: MakeOnce) -> tuple[Path, Path]:
    """Folders of a random encoder-decoder target and a smaller random draft with one tokenizer."""

    def write(root: Path) -> None:
        write_t5(root / "target", num_layers=2, hidden_size=32, seed=1)
        write_t5(root / "draft", num_layers=1, hidden_size=16, seed=2)

    root = made_once("text2text-checkpoints", write)
    return root / "target", root / "draft"


@pytest.fixture(scope="session")
def tiny_text2text_bundle(
    tiny_text2text_checkpoints: tuple[Path, Path], made_once: MakeOnce
) -> Path:
    """Folder of the bundle exported from ``tiny_text2text_checkpoints``, float32, sources of 96 tokens."""
    from outrider.export.pipeline import ExportOptions, export_bundle

    def export(root: Path) -> None:
        target, draft = tiny_text2text_checkpoints
        options = ExportOptions(
            max_context=128, max_source=96, max_batch=8, max_gamma=4, max_tree_nodes=16
        )
        export_bundle(
            target=target,
            draft=draft,
            out=root / "text2text",
            options=options,
            progress=lambda stage: None,
        )

    return made_once("text2text-bundle", export) / "text2text"


@pytest.fixture
def export_small(tiny_checkpoints: tuple[Path, Path], tmp_path: Path) -> Callable[..., Bundle]:
    """Exports the tiny draft alone as a target of 64 tokens; ``ExportOptions``, and of ``export_bundle``."""
    from outrider.export.pipeline import ExportOptions, export_bundle

    def export(
        target: Path = tiny_checkpoints[1],
        draft: Path | None = None,
        out: Path = tmp_path / "bundle",
        progress: Callable[[str], None] = lambda stage: None,
        **options: object,
    ) -> Bundle:
        wanted = ExportOptions(**{"max_context": 64} | options)
        return export_bundle(target=target, draft=draft, out=out, options=wanted, progress=progress)

    return export


@pytest.fixture(scope="session")
def run_on_stubs() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs this Python where ONNX Runtime's real CUDA provider finds stub libraries; variables as names."""
    try:
        make_environment()
    except NoEnvironmentError as error:
        pytest.skip(str(error))

    def run(*arguments: str, fails: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "faulthandler", *arguments]
        done = subprocess.run(command, env=variables() | more, capture_output=True, text=True)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def optimised_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], onnx.GraphProto]:
    """What ONNX Runtime makes of a graph file when the engines' own ``open_session`` opens it."""
    open_plainly = onnxruntime.InferenceSession
    written = tmp_path / "optimised.onnx"

    def open_and_write(
        path: str, options: onnxruntime.SessionOptions, **arguments: object
    ) -> object:
        options.optimized_model_filepath = str(written)
        options.log_severity_level = 3  # the written file is for this machine: a warning says so
        return open_plainly(path, options, **arguments)

    def optimise(path: Path) -> onnx.GraphProto:
        with monkeypatch.context() as patch:
            patch.setattr(onnxruntime, "InferenceSession", open_and_write)
            open_session(path)
        return onnx.load(written, load_external_data=False).graph

    return optimise
