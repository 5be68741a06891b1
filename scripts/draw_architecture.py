"""Writes the drawings of ARCHITECTURE.md that follow from the code: the three rings, and the calls of one step.

    python -m scripts.draw_architecture

Imports and calls are read from the syntax trees; the list of what a step calls, with its notes, is written by hand.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
# Where the modules of a dotted name lie.
PLACES = {
    "outrider.engines": "engines",
    "outrider.runtime": "runtime",
    "outrider.export": "export",
    "outrider": "proto/outrider",
    "scripts": "scripts",
}
STEP_FILE = "runtime/loop/step.py"
# What a step calls, with the file that defines it. Order, nesting and the functions between are the code's.
CALLS = {
    "plan_step": ("runtime/core/scheduler.py", "plan: one read or one chunk of a prompt, and the decoding rows"),
    "read": ("runtime/loop/prefill.py", "the encoder reads sources, or"),
    "feed": ("runtime/loop/prefill.py", "the target reads the chunk; the last chunk gives the first token"),
    "choose": ("runtime/gamma/controller.py", "gamma per row"),
    "take_round": ("runtime/loop/device_step.py", "on an accelerator: draft, run and judge in one call, else:"),
    "propose": ("runtime/loop/drafting.py", "draft"),
    "row_to_judge": ("runtime/loop/drafting.py", "sampling parameters and draft of a row"),
    "extend": ("engines/base.py", "run: one pass of the target"),
    "judge": ("engines/sampling/base.py", "judge: the accepted tokens, and the token after them"),
    "keep_path": ("engines/base.py", "of a tree, the cache rows of the accepted path"),
    "commit": ("runtime/core/request.py", "commit: tokens, text, counts, events"),
    "report_outcomes": ("runtime/loop/drafting.py", "drafters learn the outcome"),
    "observe": ("runtime/gamma/controller.py", "so does the gamma controller"),
}  # fmt: skip


def main() -> None:
    """Write both drawings into the page."""
    PAGE.write_text(with_drawings(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_drawings(page: str) -> str:
    """Return the page with the drawings between their markers as the code has them now."""
    for name, lines in (("rings", rings(imports())), ("step", step("run_step", STEP_FILE))):
        found = re.search(rf"<!-- {name}: [^\n]*-->\n", page)
        if found is None:
            raise SystemExit(f"ARCHITECTURE.md has no place for {name}")
        end = page.index("<!-- end -->", found.end())
        page = "\n".join([page[: found.end()] + lines[0], *lines[1:], page[end:]])
    return page


def folder_of(module: str) -> str | None:
    """Return the folder that is drawn for a module; None for what is not drawn."""
    name = next((one for one in PLACES if module == one or module.startswith(one + ".")), None)
    if name is None:
        return None
    parts = [PLACES[name], *module.removeprefix(name).strip(".").split(".")]
    is_of_addon = parts[1:2] in (["addons"], ["accelerators"])
    depth = {"runtime": 2, "scripts": 2}.get(parts[0], 1) + is_of_addon
    folder = "/".join(parts[:depth])
    is_drawn = len(parts) > depth and (ROOT / folder).is_dir()
    return folder if is_drawn and (parts[0] != "scripts" or parts[1] == "lab") else None


def imports() -> dict[str, set[str]]:
    """Return the folders that each folder imports, those of annotations alone left out."""
    found: dict[str, set[str]] = defaultdict(set)
    for package, place in PLACES.items():
        for path in sorted((ROOT / place).rglob("*.py")):
            module = ".".join((package, *path.relative_to(ROOT / place).with_suffix("").parts))
            if (folder := folder_of(module)) is None:
                continue
            for name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
                imported = folder_of(name)
                if imported not in (None, folder):
                    found[folder].add(str(imported))
    return found


def imported_names(node: ast.AST) -> Iterator[str]:
    """Yield what a file imports at run time, ``from a import b`` as ``a.b``."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported_names(child)


def reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Return the folders that a folder imports, directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges.get(waiting.pop(), set()) - found
        found |= new
        waiting.extend(new)
    return found


def rings(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the rings in mermaid, with an arrow for each import that no path of other arrows shows."""
    folders = sorted({*edges, *(one for many in edges.values() for one in many)})
    below = {one: reached(one, edges) for one in folders}
    # Folders that import each other are one box.
    box = {one: min([one, *(two for two in below[one] if one in below[two])]) for one in folders}
    lines = ["```mermaid", "flowchart TD"]
    for ring in ("lab", "add-ons", "core"):
        lines.append(f'  subgraph {ring.replace("-", "")}["{ring}"]')
        for one in (one for one in folders if ring_of(one) == ring and box[one] == one):
            label = "<br>".join(two for two in folders if box[two] == one)
            lines += [f'    {key(one)}["{label}"]']
        lines.append("  end")
    for one in (one for one in folders if box[one] == one):
        others = {box[two] for two in below[one]} - {one}
        shown = (two for two in others if not any(two in below[via] for via in others - {two}))
        lines += [f"  {key(one)} --> {key(two)}" for two in sorted(shown)]
    return [*lines, *entry_points(), "```"]


def ring_of(folder: str) -> str:
    """Return the ring of a folder."""
    if "/addons/" in folder or folder.endswith("/accelerators"):
        return "add-ons"
    return "lab" if folder == "scripts/lab" else "core"


def key(folder: str) -> str:
    """Return the identifier of a folder's box."""
    return folder.replace("/", "_")


def entry_points() -> Iterator[str]:
    """Yield an arrow from the core to each add-on that it finds by an entry point."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group, entries in sorted(project["entry-points"].items()):
        folders = {folder_of(place.partition(":")[0]) for place in entries.values()}
        for folder in sorted(one for one in folders if one and ring_of(one) == "add-ons"):
            yield f'  core -.->|"{group}"| {key(folder)}'


def step(name: str, file: str) -> list[str]:
    """Return the calls of a step as an indented list, each once; functions of ``runtime/loop`` are opened."""
    missing = dict(CALLS)

    def drawn(name: str, file: str, depth: int) -> list[str]:
        if name in CALLS and missing.pop(name, None) is None:
            return []
        here, found = functions(file), f"{'  ' * depth + name:<22}{file:<34}"
        if name in CALLS:
            if name not in here:
                raise SystemExit(f"{file} has no {name}")
            return [found + CALLS[name][1]]
        places = {called: places_of(file).get(called) for called in called_names(here[name])}
        below = [drawn(called, at, depth + 1) for called, at in places.items() if at is not None]
        return [found.rstrip(), *chain(*below)] if any(below) else []

    lines = drawn(name, file, 0)
    if missing:
        raise SystemExit(f"not called by a step: {', '.join(sorted(missing))}")
    return ["```", *lines, "```"]


def functions(file: str) -> dict[str, ast.FunctionDef]:
    """Return the functions and methods of a file by name."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}


def places_of(file: str) -> dict[str, str]:
    """Return the file of each function that a file may call: its own, those it imports from the loop, and ``CALLS``."""
    found = dict.fromkeys(functions(file), file)
    for name in imported_names(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        module, _, function = name.rpartition(".")
        if module.startswith("outrider.runtime.loop."):
            found[function] = f"{module.removeprefix('outrider.').replace('.', '/')}.py"
    return {
        **{called: at for called, at in found.items() if called in functions(at)},
        **{called: at for called, (at, _) in CALLS.items()},
    }


def called_names(node: ast.AST) -> Iterator[str]:
    """Yield the functions that a body calls, in the order in which they are called.

    Handlers of exceptions and branches that return early are left out: the others are the way of a step that decodes.
    """
    if isinstance(node, ast.ExceptHandler):
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return):
        children = [node.test, *node.orelse]
    for child in children:
        yield from called_names(child)
    if isinstance(node, ast.Call):
        yield node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)


if __name__ == "__main__":
    main()
