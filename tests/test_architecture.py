"""Import directions between packages, and sizes of functions and classes, held by reading every file's syntax tree."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = (
    "engines.base engines.spans engines.trees engines.buffers engines.sampling.base engines.rounds"
)
ENGINES = (
    f"numpy {CONTRACTS} engines.tree_inputs engines.kv_cache engines.devices engines.bundle "
    "engines.determinism engines.memory engines.addons engines.backends engines.pair"
)
CORE = f"numpy {CONTRACTS} runtime.core runtime.grammar.base"
GRPC = "grpc_status grpc_health grpc_reflection google outrider.v1 outrider.oip"

# What a package may import beside the standard library and itself; names without "outrider." are ours, and the longest
# prefix that fits a module decides. "*" is anything, but for the libraries of HEAVY.
RULES = {
    "engines": ENGINES,
    "engines.jit": "",
    "engines.pair": f"{ENGINES} engines.sampling",
    "engines.opening": "*",
    "engines.bundle": f"{CONTRACTS} msgspec",
    "engines.sampling": f"{CONTRACTS} numpy engines.jit",
    "engines.onnx": f"{ENGINES} engines.jit",
    "engines.accelerators": f"{ENGINES} engines.sampling engines.onnx.session",
    "engines.reference": ENGINES,
    "runtime": "",
    "runtime.core": CORE,
    "runtime.admission": CORE,
    "runtime.oracle": CORE,
    "runtime.gamma": f"{CORE} runtime.drafters",
    "runtime.grammar": CORE,
    "runtime.prefix_cache": CORE,
    "runtime.drafters": f"{CORE} engines.jit",
    "runtime.loop": f"{CORE} runtime.gamma runtime.drafters runtime.grammar runtime.prefix_cache "
    "runtime.admission engines.sampling",
    "runtime.calibration": f"{CORE} runtime.loop runtime.gamma engines.kv_cache engines.reference",
    "runtime.serving": f"{ENGINES} {GRPC} engines.opening runtime prometheus_client tokenizers msgspec",
    "runtime.serving.security": f"{GRPC} runtime.core runtime.serving.status "
    "runtime.serving.observability.logs prometheus_client",
    "runtime.addons": f"numpy {GRPC} runtime",
    "runtime.offline": f"{ENGINES} engines.opening engines.sampling runtime",
    "runtime.offline.llm": "runtime outrider.options outrider.outputs outrider.v1 rich",
    "runtime.verify": f"{ENGINES} engines.opening engines.sampling runtime",
    "runtime.cli": "*",
    "export": "*",
    "outrider": "google runtime.offline.llm",
    "outrider.testing": "outrider.absent pytest",
}
# Add-ons by name: the core finds them by entry points, and nobody but an add-on itself imports it.
ADDONS = {
    "accelerators": "engines.accelerators export.accelerators",
    "kserve": "runtime.addons.kserve",
    "ray": "runtime.addons.ray",
    "vllm": "runtime.addons.vllm",
}
# Packages that nobody may import but these.
PRIVATE = {
    "runtime.oracle": "runtime.oracle runtime.offline runtime.verify export",
    "runtime.serving": "runtime.serving runtime.offline runtime.verify runtime.addons runtime.cli",
    "runtime.offline": "runtime.offline runtime.cli outrider",
    "runtime.verify": "runtime.verify runtime.cli",
    "runtime.cli": "runtime.cli",
    "export": "export runtime.cli",
    "scripts": "",
    "tests": "",
}
# A heavy library may appear only here.
HEAVY = {
    "torch": "engines.reference export",
    "transformers": "engines.reference export",
    "optimum": "export",
    "huggingface_hub": "export",
    "onnx": "export",
    "onnxscript": "export",
    "onnx_ir": "export",
    "onnxruntime": "engines.onnx engines.accelerators.onnx",
    "sentencepiece": "export.tokenizers",
    "tensorrt": ADDONS["accelerators"],
    "cuda": "engines.accelerators.device",
    "numba": "engines.jit engines.sampling engines.onnx.packed_loops engines.onnx.state_loops runtime.drafters.text",
    "grpc": "runtime.serving runtime.addons outrider",
    "ray": "runtime.addons.ray.app runtime.addons.ray.router",
    "matplotlib": "runtime.offline",
    "jinja2": "runtime.offline runtime.serving.chat",
    "llguidance": "runtime.grammar",
    "cryptography": "engines.bundle.signatures runtime.serving.security",
    "starlette": "runtime.serving.http",
    "uvicorn": "runtime.serving.http",
    "jwt": "runtime.serving.security",
    "smg_grpc_proto": "runtime.addons.vllm",
    "opentelemetry": "runtime.serving.observability.spans",
}
# Imports inside functions: what costs seconds to load, or may be missing.
LAZY = (
    "engines.opening engines.accelerators.backends engines.accelerators.tensorrt.api engines.bundle.signatures export "
    "runtime.cli runtime.grammar.library runtime.serving.security runtime.serving.http.factory "
    "runtime.addons.vllm.opening runtime.serving.observability.tracing outrider"
)
# The client names it, and is installed without it.
ABSENT = "runtime.offline.llm"
# Imported for annotations only: which module it is at run time, or whether it is there, is decided elsewhere.
TYPING_ONLY = {"tensorrt", "llguidance", "cryptography", "jwt"}
# Of a function, and of a class that is no value; ruff bounds the complexity (pyproject.toml). A compiled loop has as
# many lines and arguments as it needs: it takes arrays and numbers, and calls between loops cost. A command's signature
# is its options.
MOST_LINES, MOST_PARAMETERS, MOST_ATTRIBUTES = 60, 9, 15
LARGER = {
    "export.graph.tracing.kv_export._attention": "it takes what Transformers gives an attention function",
}


def is_under(module: str, prefixes: str) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes.split())


def short(name: str) -> str:
    """Our own modules by the folder they lie in: "outrider.engines.base" as "engines.base"."""
    top, _, rest = name.partition(".")
    if top in ("engines", "runtime", "export"):
        return f"top-level {name}"
    return (
        rest
        if top == "outrider" and rest.split(".")[0] in ("engines", "runtime", "export")
        else name
    )


def project_files() -> list[tuple[str, Path]]:
    roots = [(ROOT, ("engines", "export", "runtime")), (ROOT / "proto", ("outrider",))]
    return [
        (".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path)
        for root, folders in roots
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]


def imported_names(node: ast.AST) -> Iterator[str]:
    """Dotted names of an import statement, ``from a import b`` as ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (short(alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = "." * node.level + (node.module or "")
        yield from (short(f"{source}.{alias.name}") for alias in node.names)


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


def offence(module: str, name: str) -> str | None:
    top = name.split(".")[0]
    for addon, folders in ADDONS.items():
        if is_under(name, folders) and not is_under(module, folders):
            return f"nobody imports the add-on {addon}"
    for private, friends in PRIVATE.items():
        if is_under(name, private) and not is_under(module, friends):
            return f"only {friends or 'nobody'} may import {private}"
    if top in HEAVY and not is_under(module, HEAVY[top]):
        return f"{top} belongs in {HEAVY[top]}"
    if top in HEAVY:
        return None
    rule = max((prefix for prefix in RULES if is_under(module, prefix)), key=len)
    own = rule if rule not in ("engines", "runtime") else ""
    allowed = f"{RULES[rule]} {own}"
    if top in sys.stdlib_module_names or "*" in allowed or is_under(name, allowed):
        return None
    return f"allowed: {allowed}"


def broken_rules(module: str, source: str) -> list[str]:
    """Every offence of a file, as "module:line: imports name: rule"."""
    tree = ast.parse(source)
    lazy = lazy_imports(tree)
    found = []
    for node in ast.walk(tree):
        for name in imported_names(node):
            reason = offence(module, name)
            is_escape = node in lazy and name.split(".")[0] not in TYPING_ONLY
            if reason is None and is_escape and not is_under(module, LAZY):
                reason = f"lazy imports belong in {LAZY}"
            if is_under(module, "outrider") and is_under(name, ABSENT) and node not in lazy:
                reason = "the client is installed without it"
            if reason is not None:
                found.append(f"{module}:{getattr(node, 'lineno', 0)}: imports {name}: {reason}")
    return found


@pytest.mark.parametrize(("module", "path"), project_files(), ids=lambda value: str(value)[-40:])
def test_imports_keep_their_directions(module: str, path: Path) -> None:
    found = broken_rules(module, path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


def own_attributes(node: ast.ClassDef) -> set[str]:
    """Names that a class's methods assign on ``self``; none for a value, whose fields are all there is to it."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and ast.unparse(one.value) == "self"
    }


def too_large(module: str, source: str) -> list[str]:
    """Every function and class beyond the bounds, as "module.name: how large"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bounds = [(len(own_attributes(node)), MOST_ATTRIBUTES, "attributes")]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            is_loop = any("njit_exact" in ast.unparse(one) for one in node.decorator_list)
            is_command = any("Annotated[" in ast.unparse(one) for one in given)
            if is_loop:
                continue
            first = node.body[0] if is_command else node
            num_lines = (node.end_lineno or 0) - first.lineno + 1
            num_given = len([one for one in given if one.arg not in ("self", "cls")])
            bounds = [(num_lines, MOST_LINES, "lines")]
            bounds += [(num_given, MOST_PARAMETERS, "parameters")] if not is_command else []
        else:
            continue
        name = f"{module}.{node.name}"
        found += [
            f"{name}: {size} {words}"
            for size, most, words in bounds
            if size > most and name not in LARGER
        ]
    return found


@pytest.mark.parametrize(("module", "path"), project_files(), ids=lambda value: str(value)[-40:])
def test_functions_and_classes_are_small(module: str, path: Path) -> None:
    found = too_large(module, path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "offence"),
    [
        ("def f():\n" + "    pass\n" * MOST_LINES, "m.f: 61 lines"),
        ("class A:\n  def f(self, a, b, c, d, e, *, f, g, h, i, j): ...", "m.f: 10 parameters"),
        (
            "class A:\n  def f(self):\n"
            + "".join(f"    self.a{one} = {one}\n" for one in range(16)),
            "m.A: 16 attributes",
        ),
        ("@njit_exact(void())\ndef f(a, b, c, d, e, f, g, h, i, j): ...", None),
        ("def f(a: Annotated[int, 1], b, c, d, e, f, g, h, i, j): ...", None),
    ],
)
def test_what_is_too_large_is_named(source: str, offence: str | None) -> None:
    assert too_large("m", source) == ([] if offence is None else [offence])


def test_every_file_is_seen() -> None:
    modules = {module for module, _ in project_files()}
    assert {"engines", "engines.base", "runtime.core.params", "outrider.client"} <= modules


def test_no_folder_holds_more_than_a_street() -> None:
    folders = [path.parent for path in ROOT.rglob("*.py") if path.name != "__init__.py"]
    own = [
        one
        for one in folders
        if not any(part.startswith((".", "build")) for part in one.relative_to(ROOT).parts)
    ]
    crowded = {str(one.relative_to(ROOT)): own.count(one) for one in {*own} if own.count(one) > 15}
    assert not crowded


def test_the_table_is_short() -> None:
    assert len(RULES) <= 30


@pytest.mark.parametrize(
    ("module", "source", "offender"),
    [
        ("runtime.core.request", "import torch", "1: imports torch"),
        ("runtime.core.request", "import grpc", "1: imports grpc"),
        (
            "runtime.core.request",
            "x = 1\nfrom outrider.engines import bundle",
            "2: imports engines.bundle",
        ),
        ("runtime.core.request", "from ..worker import Worker", "imports ..worker.Worker"),
        (
            "runtime.core.request",
            "from engines.base import Span",
            "imports top-level engines.base.Span",
        ),
        (
            "runtime.drafters.model.model",
            "from outrider.runtime.loop.step import run",
            "imports runtime.loop.step.run",
        ),
        ("runtime.loop.step", "import outrider.runtime.oracle.block", "only runtime.oracle"),
        (
            "runtime.loop.worker",
            "import outrider.engines.onnx.engine",
            "imports engines.onnx.engine",
        ),
        ("runtime.serving.server", "import torch", "torch belongs in"),
        ("runtime.serving.server", "import outrider.export.pipeline", "may import export"),
        ("runtime.serving.server", "def f():\n    import outrider.engines.opening", "2: imports"),
        ("engines.base", "import outrider.engines.opening", "imports engines.opening"),
        (
            "engines.opening",
            "def f():\n    from outrider.engines.accelerators.backends import CudaBackend",
            "nobody imports the add-on accelerators",
        ),
        (
            "runtime.addons.kserve.service",
            "import outrider.runtime.addons.vllm.wire",
            "nobody imports the add-on vllm",
        ),
        ("engines.kv_cache", "import onnxruntime", "onnxruntime belongs in"),
        ("export.certificate.parity", "import tests.conftest", "nobody"),
        (
            "outrider.client",
            "from outrider.runtime.core import errors",
            "imports runtime.core.errors",
        ),
        ("outrider.client", "import numpy", "imports numpy"),
        ("outrider.client", "from outrider.runtime.offline.llm import LLM", "installed without"),
    ],
)
def test_an_offending_line_is_named(module: str, source: str, offender: str) -> None:
    found = broken_rules(module, source)
    assert len(found) == 1
    assert offender in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engines.opening", "def f():\n    from outrider.engines.onnx.engine import OnnxEngine"),
        ("runtime.cli.main", "def f():\n    import outrider.export.pipeline"),
        (
            "runtime.core.slots",
            "import heapq\nimport numpy as np\nfrom outrider.engines.base import Span",
        ),
        ("runtime.loop.worker", "import threading\nfrom outrider.runtime.core.events import Event"),
        ("outrider", "if TYPE_CHECKING:\n    from outrider.runtime.offline.llm import LLM"),
    ],
)
def test_lawful_imports_pass(module: str, source: str) -> None:
    assert broken_rules(module, source) == []
