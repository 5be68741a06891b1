"""Import directions, held by reading every file's syntax tree."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = ("engines", "export", "runtime", "outrider")
PURE = {"numpy"}
CORE = {
    "engines.base",
    "engines.laws",
    "engines.noise",
    "engines.rounds",
    "engines.trees",
    "runtime.core",
}
GRPC = {"grpc", "grpc_status", "grpc_health", "google", "outrider.v1"}
SERVICE = {
    "runtime.metrics",
    "runtime.outbox",
    "runtime.service",
    "runtime.serving",
    "runtime.status",
    "runtime.stream",
    "runtime.tokenizer",
    "runtime.wire",
    "runtime.worker",
}
ANY = {"*"}

# Module prefix -> prefixes it may import beside the standard library and itself. The longest
# prefix that fits a module decides.
RULES: dict[str, set[str]] = {
    "engines": PURE | {"engines"},
    "engines.base": PURE,
    "engines.compiled": {"numba"},
    "engines.packed_loops": PURE | {"numba", "engines.base", "engines.compiled"},
    "engines.philox": PURE | {"numba", "engines.compiled"},
    "engines.kernels": PURE | {"numba", "engines.compiled", "engines.philox"},
    "engines.laws": PURE | {"engines.base"},
    "engines.noise": PURE | {"engines.base", "engines.laws", "engines.philox"},
    "engines.bundle": {
        "engines.base",
        "engines.bundle_files",
        "engines.manifest_fields",
        "engines.onnx_files",
        "engines.plans",
        "engines.serving_defaults",
    },
    "engines.bundle_files": {"engines.base"},
    "engines.serving_defaults": {"engines.manifest_fields"},
    "engines.plans": {"engines.base", "engines.manifest_fields"},
    "engines.tensorrt_api": {"engines.base", "tensorrt"},
    "engines.devices": {"engines.base"},
    "engines.plan_device": PURE,
    "engines.cuda_device": PURE | {"engines.base", "engines.plan_device", "cuda"},
    "engines.tree_judge": PURE | {"engines"},
    "engines.rounds": {"engines.base", "engines.laws"},
    "engines.trees": PURE | {"engines.base"},
    "engines.onnx_engine": PURE | {"engines", "onnxruntime"},
    "engines.bound_session": {"engines", "onnxruntime"},
    "engines.onnx_session": PURE | {"engines", "onnxruntime"},
    "engines.onnx_calls": PURE | {"engines", "onnxruntime"},
    "engines.onnx_packed": PURE | {"engines", "onnxruntime"},
    "engines.onnx_tree": PURE | {"engines", "onnxruntime"},
    "engines.tensorrt_program": {"engines", "tensorrt"},
    "engines.torch_engine": PURE | {"engines", "torch", "transformers"},
    # A new file of runtime needs a line here.
    "runtime": set(),
    "runtime.core": PURE | CORE,
    # Loops of decisions and drafters, compiled: numpy's calls on a few numbers cost more than a small model's token.
    "runtime.core.automaton_loops": PURE | {"numba", "engines.compiled"},
    "runtime.core.choice_loops": PURE | {"numba", "engines.compiled"},
    "runtime.core.evidence_loops": PURE | {"numba", "engines.compiled"},
    "runtime.core.feeding_loops": PURE | {"numba", "engines.compiled"},
    "runtime.core.lookup_loops": PURE | {"numba", "engines.compiled"},
    "runtime.core.packed_loops": PURE | {"numba", "engines.compiled"},
    "runtime.core.trial_loops": PURE | {"numba", "engines.compiled"},
    "runtime.core.step_time_loops": PURE | {"numba", "engines.compiled"},
    "runtime.drafters": PURE | CORE | {"engines.compiled.address", "runtime.drafters"},
    "runtime.drafters.guarded": CORE | {"engines.spans", "runtime.drafters.base"},
    "runtime.propose": PURE | CORE | {"runtime.drafters.base", "runtime.drafters.Drafters"},
    "runtime.prompts": CORE,
    "runtime.rounds": PURE
    | CORE
    | {
        "runtime.propose",
        "runtime.drafters.model",
        "runtime.drafters.base",
        "runtime.drafters.Drafters",
    },
    "runtime.step": PURE
    | CORE
    | {
        "engines.tree_judge",
        "runtime.propose",
        "runtime.rounds",
        "runtime.step_parts",
        "runtime.drafters.base",
    },
    "runtime.step_parts": PURE
    | CORE
    | {
        "runtime.prompts",
        "runtime.propose",
        "runtime.steering",
        "runtime.drafters.model.MAX_SHARED_MISSING",
        "runtime.drafters.base",
        "runtime.drafters.Drafters",
        "runtime.drafters.build_drafters",
    },
    "runtime.beam_cache": PURE | CORE,
    "runtime.search": PURE | CORE | {"engines.continuations", "runtime.beam_cache"},
    "runtime.beams": PURE
    | CORE
    | {"runtime.beam_cache", "runtime.search", "runtime.step_parts.StepResult"},
    "runtime.rows": CORE | {"runtime.search"},
    "runtime.intake": CORE | {"runtime.speculate"},
    "runtime.speculate": CORE | {"runtime.drafters.DRAFTER_NAMES", "runtime.drafters.Drafters"},
    # The worker is given engines and builds its drafters over them.
    "runtime.worker": PURE
    | CORE
    | {
        "runtime.beams",
        "runtime.intake",
        "runtime.outgoing",
        "runtime.rows",
        "runtime.settle",
        "runtime.speculate",
        "runtime.step",
        "runtime.step_parts",
    },
    "runtime.settle": CORE
    | {
        "runtime.drafters.Drafters",
        "runtime.outgoing",
        "runtime.rows",
        "runtime.speculate",
        "runtime.step_parts.StepResult",
    },
    # Measures engines it is given, through a worker of its own.
    "runtime.calibrate": PURE
    | CORE
    | {"engines.kv_cache", "runtime.host_costs", "runtime.tree_costs"},
    "runtime.tree_costs": PURE | CORE | {"engines.kv_cache"},
    "runtime.host_costs": PURE | CORE | {"engines.kv_cache", "runtime.worker"},
    "runtime.cost_store": CORE,
    "runtime.steering": PURE
    | CORE
    | {
        "runtime.alike_steps",
        "runtime.drafters.base",
        "runtime.row_evidence",
        "runtime.steering_rows",
        "runtime.untold_steps",
    },
    "runtime.alike_steps": CORE | {"runtime.steering_rows"},
    "runtime.untold_steps": CORE
    | {"runtime.drafters.base", "runtime.row_evidence", "runtime.steering_rows"},
    "runtime.row_evidence": PURE | CORE | {"runtime.steering_rows"},
    "runtime.steering_rows": PURE | CORE | {"runtime.drafters.base"},
    "runtime.serving_defaults": CORE | {"engines.serving_defaults"},
    "runtime.metrics": CORE | {"runtime.worker", "prometheus_client"},
    "runtime.tokenizer": CORE | {"tokenizers"},
    "runtime.outbox": CORE,
    "runtime.outgoing": CORE,
    "runtime.status": CORE | GRPC,
    "runtime.wire": CORE | {"outrider.v1", "google"},
    "runtime.serving": CORE | {"runtime.worker", "runtime.tokenizer", "outrider.v1"},
    "runtime.stream": CORE | SERVICE | GRPC,
    "runtime.service": PURE | CORE | SERVICE | GRPC,
    "runtime.trace": {"rich", "outrider.v1"},
    "runtime.build_progress": {"rich"},
    "runtime.chi_square": PURE,
    # Opens a bundle as the server does, and holds its answers against the oracle.
    "runtime.verify_sampler": ANY,
    "runtime.verify_rounds": PURE
    | CORE
    | {"engines.cpu_sampler", "runtime.chi_square", "runtime.verify_report"},
    "runtime.verify_report": CORE,
    "runtime.verify_pair": ANY,
    # Measures a bundle in process; nobody but the command line may import it.
    "runtime.offline": ANY,
    "runtime.opening": ANY,
    "runtime.server": ANY,
    "runtime.cli": ANY,
    "runtime.cli_client": ANY,
    "runtime.cli_datastore": ANY,
    "runtime.cli_offline": ANY,
    "runtime.cli_refusals": ANY,
    "export": ANY,
    "outrider": {"grpc", "grpc_status", "google", "outrider"},
}
# A heavy library may appear only under these prefixes.
HEAVY: dict[str, set[str]] = {
    "torch": {"engines.torch_engine", "export"},
    "transformers": {"engines.torch_engine", "export"},
    "optimum": {"export"},
    "onnx": {"export"},
    "onnxscript": {"export"},
    "numba": {
        "engines.compiled",
        "engines.kernels",
        "engines.packed_loops",
        "engines.philox",
        "runtime.core.choice_loops",
        "runtime.core.automaton_loops",
        "runtime.core.evidence_loops",
        "runtime.core.feeding_loops",
        "runtime.core.lookup_loops",
        "runtime.core.packed_loops",
        "runtime.core.trial_loops",
        "runtime.core.step_time_loops",
    },
    "onnxruntime": {
        "engines.onnx_engine",
        "engines.onnx_session",
        "engines.onnx_tree",
        "engines.bound_session",
        "engines.onnx_calls",
        "engines.onnx_packed",
        "export",
    },
    # Annotations; the modules themselves are imported by tensorrt_api, by name, either flavour.
    "tensorrt": {"engines.tensorrt_api", "engines.tensorrt_program", "export"},
    "cuda": {"engines.cuda_device"},
    "grpc": {
        "runtime.service",
        "runtime.status",
        "runtime.stream",
        "runtime.server",
        "runtime.cli",
        "outrider",
    },
    "prometheus_client": {"runtime.metrics", "runtime.server"},
    "tokenizers": {"runtime.tokenizer", "export"},
    "typer": {
        "runtime.cli",
        "runtime.cli_client",
        "runtime.cli_datastore",
        "runtime.cli_offline",
        "runtime.cli_refusals",
    },
    "matplotlib": {"runtime.offline"},
    "jinja2": {"runtime.offline"},
}
LAZY = {
    "engines",
    "runtime.cli",
    "runtime.cli_client",
    "runtime.cli_offline",
    "runtime.cli_refusals",
}
# Imported for annotations only: which module it is at run time, tensorrt_api decides.
TYPING_ONLY = {"tensorrt"}
# Nothing but the command line may reach the exporter, and nothing at all scripts or tests.
NOBODY_IMPORTS = {"scripts": set[str](), "tests": set[str](), "export": {"export", "runtime.cli"}}


def is_under(module: str, prefixes: set[str]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def project_files() -> list[tuple[str, Path]]:
    files = [
        (module_name(path, root), path)
        for root, folders in (
            (ROOT, ("engines", "export", "runtime")),
            (ROOT / "proto", ("outrider",)),
        )
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
    ]
    return [
        (module, path) for module, path in files if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]


def imported_names(node: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted names of an import statement, ``from a import b`` as ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = module.split(".")[: None if is_package else -1]
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        yield from (f"{source}.{alias.name}" for alias in node.names)


def lazy_imports(tree: ast.Module) -> set[ast.AST]:
    """Import statements inside functions or ``if TYPE_CHECKING`` blocks."""
    return {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.dump(outer.test))
        for inner in ast.walk(outer)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }


def broken_rules(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Every offence of a file, as "module:line: imports name: rule"."""
    tree = ast.parse(source)
    lazy = lazy_imports(tree)
    rule = max((prefix for prefix in RULES if is_under(module, {prefix})), key=len)
    found = []
    for node in ast.walk(tree):
        for name in imported_names(node, module, is_package):
            reason = offence(module, name, RULES[rule])
            is_escape = node in lazy and name.split(".")[0] not in TYPING_ONLY
            if reason is None and is_escape and module not in LAZY:
                reason = "lazy imports belong in " + ", ".join(sorted(LAZY))
            if reason is not None:
                found.append(f"{module}:{getattr(node, 'lineno', 0)}: imports {name}: {reason}")
    return found


def offence(module: str, name: str, allowed: set[str]) -> str | None:
    top = name.split(".")[0]
    if top in NOBODY_IMPORTS and not is_under(module, NOBODY_IMPORTS[top]):
        return f"only {sorted(NOBODY_IMPORTS[top]) or 'nobody'} may import {top}"
    if top in HEAVY and not is_under(module, HEAVY[top]):
        return f"{top} belongs in {sorted(HEAVY[top])}"
    if top in sys.stdlib_module_names or allowed == ANY or is_under(name, allowed):
        return None
    return f"allowed: {sorted(allowed)}"


@pytest.mark.parametrize(("module", "path"), project_files(), ids=lambda value: str(value)[-40:])
def test_imports_keep_their_directions(module: str, path: Path) -> None:
    found = broken_rules(
        module, path.read_text(encoding="utf-8"), is_package=path.stem == "__init__"
    )
    assert not found, "\n".join(found)


def test_every_file_is_seen() -> None:
    modules = {module for module, _ in project_files()}
    assert {"engines", "engines.base", "runtime.core.params"} <= modules
    assert all(module.split(".")[0] in PROJECT for module in modules)


@pytest.mark.parametrize(
    ("module", "source", "offender"),
    [
        ("runtime.core.slots", "import torch", "1: imports torch"),
        ("runtime.core.slots", "import grpc", "1: imports grpc"),
        ("runtime.core.slots", "x = 1\nfrom engines import bundle", "2: imports engines.bundle"),
        ("runtime.core.slots", "from ..worker import Worker", "imports runtime.worker.Worker"),
        ("runtime.drafters.model", "from runtime.step import run", "imports runtime.step.run"),
        ("runtime.step", "import runtime.worker", "imports runtime.worker"),
        ("runtime.worker", "import engines.onnx_engine", "imports engines.onnx_engine"),
        ("runtime.server", "import torch", "torch belongs in"),
        ("runtime.server", "import export.pipeline", "may import export"),
        ("runtime.server", "def f():\n    import engines.onnx_engine", "2: imports"),
        ("engines.base", "import engines.bundle", "imports engines.bundle"),
        ("engines.kv_cache", "import onnxruntime", "onnxruntime belongs in"),
        ("export.parity", "import tests.conftest", "nobody"),
        ("outrider.client", "from runtime.core import errors", "imports runtime.core.errors"),
        ("outrider.client", "import numpy", "imports numpy"),
    ],
)
def test_an_offending_line_is_named(module: str, source: str, offender: str) -> None:
    found = broken_rules(module, source)
    assert len(found) == 1
    assert offender in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engines", "def f():\n    from engines.onnx_engine import OnnxEngine"),
        ("runtime.cli", "def f():\n    import export.pipeline"),
        ("runtime.core.slots", "import heapq\nimport numpy as np\nfrom engines.base import Span"),
        ("runtime.worker", "import threading\nfrom runtime.core.params import Event"),
    ],
)
def test_lawful_imports_pass(module: str, source: str) -> None:
    assert broken_rules(module, source) == []
