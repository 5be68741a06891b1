"""Every attribute of TensorRT that the code uses exists in the bindings of both flavours.

The uses are collected from the syntax trees, so the test cannot go stale: a variable that holds a
TensorRT object is annotated with its class, and using one that is not annotated is an offence.
"""

import ast
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from outrider.engines.accelerators.tensorrt.api import MODULES, RTX, TENSORRT, TensorRtApi, find_api
from outrider.engines.base import EngineError

ROOT = Path(__file__).parents[4]
FILES = sorted(
    path
    for folder in ("engines", "export")
    for path in (ROOT / folder).rglob("*.py")
    if "import tensorrt as trt" in path.read_text(encoding="utf-8")
)
# Used behind ``TensorRtApi.builds_ahead_of_time`` alone.
RTX_ONLY = {
    "ComputeCapability",
    "num_compute_capabilities",
    "set_compute_capability",
    "DynamicShapesKernelSpecializationStrategy",
    "dynamic_shapes_kernel_specialization_strategy",
    "EngineValidity",
    "INVALID",
    "engine_header_size",
    "get_engine_validity",
    "IRuntimeCache",
    "create_runtime_cache",
    "deserialize",
    "set_runtime_cache",
}


@dataclass
class Uses:
    """``paths``: names below the module; ``members``: attributes of objects of these classes."""

    paths: set[tuple[str, ...]] = field(default_factory=set)
    members: set[tuple[frozenset[str], str]] = field(default_factory=set)
    offences: list[str] = field(default_factory=list)


def dotted(node: ast.AST) -> tuple[str, ...]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else ()


def module_path(node: ast.AST) -> tuple[str, ...]:
    """``A.B`` of ``trt.A.B``, ``api.trt.A.B`` or ``self.trt.A.B``; empty for anything else."""
    parts = dotted(node)
    if "trt" in parts[:2] and parts[0] in ("trt", "api", "self"):
        return parts[parts.index("trt") + 1 :]
    return ()


def annotated_class(annotation: ast.AST | None) -> str | None:
    for node in ast.walk(annotation) if annotation is not None else ():
        if path := module_path(node):
            return path[0]
    return None


def classes_of_variables(function: ast.AST) -> tuple[dict[str, set[str]], set[str]]:
    """TensorRT classes a function's variables may have, and variables given without one."""
    classes: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            name, kind = node.arg, annotated_class(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            name, kind = ".".join(dotted(node.target)), annotated_class(node.annotation)
        elif isinstance(node, ast.Assign) and dotted(node.targets[0])[-1:] == ("__class__",):
            name, kind = dotted(node.targets[0])[0], "".join(module_path(node.value)[:1])
        else:
            continue
        if kind:
            classes.setdefault(name, set()).add(kind)
    bare = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ".".join(dotted(node.value.func)[:-1]) in classes
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return classes, bare


def collect(tree: ast.AST, uses: Uses) -> None:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    fields, _ = classes_of_variables(tree)
    shared = {name: kinds for name, kinds in fields.items() if name.startswith("self.")}
    for function in functions:
        classes, bare = classes_of_variables(function)
        classes = shared | classes
        aliases = {
            node.targets[0].id: module_path(node.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and module_path(node.value)
        }
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
                continue
            if path := module_path(node):
                uses.paths.add(tuple(part for part in path if not part.startswith("__")))
                continue
            owner = ".".join(dotted(node.value))
            if owner in aliases:
                uses.paths.add((*aliases[owner], node.attr))
            elif owner in classes:
                uses.members.add((frozenset(classes[owner]), node.attr))
            elif is_unknown_result(node.value, classes, bare):
                uses.offences.append(f"{function.name}: .{node.attr} of an unannotated result")


def is_unknown_result(value: ast.AST, classes: dict[str, set[str]], bare: set[str]) -> bool:
    if isinstance(value, ast.Name):
        return value.id in bare
    while isinstance(value, ast.Call | ast.Attribute | ast.Subscript):
        value = value.func if isinstance(value, ast.Call) else value.value
        if ".".join(dotted(value)) in classes:
            return True
    return False


def uses_of(source: str) -> Uses:
    uses = Uses()
    collect(ast.parse(source), uses)
    return uses


def missing(uses: Uses, trt: object) -> list[str]:
    found = []
    for path in uses.paths:
        owner = trt
        for part in path:
            owner = getattr(owner, part, None)
        if owner is None:
            found.append(".".join(path))
    for classes, attribute in uses.members:
        if not any(hasattr(getattr(trt, name, None), attribute) for name in classes):
            found.append(f"{'|'.join(sorted(classes))}.{attribute}")
    return sorted(found)


@pytest.fixture(scope="module")
def uses() -> Uses:
    uses = Uses()
    for path in FILES:
        collect(ast.parse(path.read_text(encoding="utf-8")), uses)
    return uses


def installed(flavour: str) -> TensorRtApi | None:
    try:
        return find_api(flavour)
    except EngineError:
        return None


def test_every_tensorrt_object_is_annotated(uses: Uses) -> None:
    assert len(FILES) >= 2
    assert uses.offences == []
    assert len(uses.paths) > 5
    assert len(uses.members) > 20


@pytest.mark.parametrize("flavour", MODULES)
def test_every_attribute_exists_in_the_installed_bindings(uses: Uses, flavour: str) -> None:
    api = installed(flavour)
    if api is None:
        pytest.skip(f"{flavour} is not installed; the test below reads its bindings' names")
    found = missing(uses, api.trt)
    assert [name for name in found if flavour == RTX or name.split(".")[-1] not in RTX_ONLY] == []


def test_every_attribute_is_named_in_the_bindings_of_the_other_flavour(uses: Uses) -> None:
    """TensorRT's library is fetched from elsewhere, so its bindings are read and not imported."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    library = Path(spec.submodule_search_locations[0], "tensorrt.so").read_bytes()
    names = {part for path in uses.paths for part in path} | {name for _, name in uses.members}
    # Linkers let a string share the tail of a longer one, so a short name proves little.
    absent = {name for name in names if f"{name}\0".encode() not in library}
    assert absent <= RTX_ONLY


def test_the_collector_sees_what_it_must() -> None:
    source = """
def f(api, network: trt.INetworkDefinition):
    kinds = api.trt.LayerType
    layer: trt.ILayer = network.get_layer(0)
    layer.__class__ = api.trt.IAttentionInputLayer
    layer.attention
    kinds.NO_SUCH
    network.no_such
    layer.nothing
"""
    api = find_api(RTX)
    assert missing(uses_of(source), api.trt) == [
        "IAttentionInputLayer|ILayer.nothing",
        "INetworkDefinition.no_such",
        "LayerType.NO_SUCH",
    ]
    for line in ("layer = network.get_layer(0)\n    layer.type", "network.get_layer(0).type"):
        assert uses_of(f"def f(network: trt.INetworkDefinition):\n    {line}").offences


def test_an_unknown_or_absent_flavour_is_named() -> None:
    with pytest.raises(EngineError, match="must be one of tensorrt, rtx"):
        find_api("cudnn")
    if installed(TENSORRT) is None:
        with pytest.raises(EngineError, match="install tensorrt"):
            find_api(TENSORRT)


def test_an_unknown_gpu_names_the_known_ones() -> None:
    api = find_api(RTX)
    with pytest.raises(EngineError, match=r"9\.9: TensorRT-RTX .* builds for 7\.5, 8\.0"):
        api.set_compute_capability(object(), "9.9")
