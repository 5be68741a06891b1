"""What the documents say of the code: folders, the step, paths, modules, commands and their options."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer
from outrider.runtime.cli.main import app

from scripts.draw_architecture import called_names, rings, with_drawings

ROOT = Path(__file__).parents[1]
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "demo/README.md", *PAGES]
# Commands of measurements are those of the commits that they name.
OF_THIS_BUILD = [one for one in DOCUMENTS if one != "docs/measurements.md"]
CODE = ("proto/outrider", "engines", "runtime", "export", "scripts", "tests")
NO_FILES = {
    "docs/gpu-check.md",
    "scripts/lab/peers/PEER/run.py",
}  # a report to be written; any peer's


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def drawing(heading: str) -> list[str]:
    """Return the lines of the first code block below a heading of ARCHITECTURE.md."""
    _, _, text = read("ARCHITECTURE.md").partition(f"\n## {heading}\n")
    return text.split("```")[1].strip("\n").splitlines()


def indent(line: str) -> int:
    return (len(line) - len(line.lstrip())) // 2


def drawn_folders(lines: list[str]) -> list[str]:
    """Return the folders of a drawing, each under the less indented one before it."""
    above: list[str] = []
    found = []
    for line in lines:
        above[indent(line) :] = [line.split()[0].rstrip("/")]
        found.append("/".join(above))
    return found


def test_every_folder_of_code_is_drawn_and_nothing_else():
    packages = {
        str(path.parent.relative_to(ROOT))
        for top in CODE
        for path in (ROOT / top).rglob("__init__.py")
    }
    drawn = drawn_folders(drawing("Folders"))
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == packages | {"tests"}


def test_the_drawings_of_rings_and_step_are_those_of_the_code():
    page = read("ARCHITECTURE.md")
    assert page.count("```mermaid") == 1
    assert with_drawings(page) == page, "run python -m scripts.draw_architecture"


def test_a_ring_that_imports_another_is_drawn():
    edges = {"runtime/core": {"engines", "runtime/addons/ray"}, "runtime/addons/ray": {"engines"}}
    lines = rings(edges)
    assert "  runtime_core --> runtime_addons_ray" in lines
    assert "  runtime_addons_ray --> engines" in lines
    assert "  runtime_core --> engines" not in lines, "the other two arrows show it"


def test_calls_are_drawn_in_the_order_in_which_they_are_made():
    source = """
def run_step():
    plan()
    if is_idle():
        return finish()
    try:
        verdicts = judge(run(draft()))
    except OSError:
        recover()
    for row in rows(): commit(row)
"""
    calls = list(called_names(ast.parse(source)))
    assert calls == ["plan", "is_idle", "draft", "run", "judge", "rows", "commit"]


@pytest.mark.parametrize("document", OF_THIS_BUILD)
def test_paths_exist(document: str):
    text = read(document)
    paths = set(
        re.findall(
            r"(?<![\w/.-])(?:engines|runtime|export|scripts|tests|proto|docs|demo)/[\w./-]*\w", text
        )
    )
    links = {
        (ROOT / document).parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    }
    missing = [path for path in sorted(paths - NO_FILES) if not (ROOT / path).exists()]
    missing += [str(link) for link in links if not link.exists()]
    assert not missing


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", page, re.M)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_to_sections_have_their_heading(document: str):
    for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", read(document)):
        page = (ROOT / document).parent / link if link else ROOT / document
        assert anchor in anchors(page.read_text(encoding="utf-8")), f"{link}#{anchor}"


@pytest.mark.parametrize("document", OF_THIS_BUILD)
def test_modules_exist_and_know_the_options(document: str):
    text = read(document).replace("\\\n", " ")
    for module, arguments in re.findall(r"python -m (scripts\.[\w.]+)([^`\n#]*)", text):
        path = ROOT / module.replace(".", "/")
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert file.exists(), module
        source = file.read_text(encoding="utf-8")
        for option in re.findall(r"--(?:no-)?([\w-]+)", arguments):
            assert option in source or option.replace("-", "_") in source, f"{module} --{option}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_of_our_modules_are_the_installed_ones(document: str):
    text = read(document)
    assert not re.findall(r"`((?:engines|runtime|export)\.[a-z][\w.]*)`", text)
    for name in re.findall(r"\boutrider((?:\.[a-z_]\w*)+)", text):
        if name in (".drafters", ".exporters", ".protocols"):  # groups of entry points
            continue
        top, *parts = name.removeprefix(".").split(".")
        found = ROOT / top if (ROOT / top).is_dir() else ROOT / "proto" / "outrider" / top
        for part in parts:
            found /= part
        module = found.parent.with_suffix(".py")
        is_in_module = module.exists() and found.name in module.read_text(encoding="utf-8")
        assert found.is_dir() or found.with_suffix(".py").exists() or is_in_module, name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_documents_parses(document: str):
    for source in re.findall(r"```python\n(.*?)```", read(document), re.S):
        ast.parse(source)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist_and_know_the_options(document: str):
    command = typer.main.get_command(app)
    text = read(document).replace("\\\n", " ")
    for name, arguments in re.findall(r"(?:^|`)outrider ([a-z][\w-]*)([^`\n#]*)", text, re.M):
        assert name in command.commands, name
        found = command.commands[name]
        commands = (found, *getattr(found, "commands", {}).values())
        known = {opt for one in commands for parameter in one.params for opt in parameter.opts}
        wanted = set(re.findall(r"(?<!\S)--[\w-]+", arguments))
        assert wanted <= known, f"{name}: {wanted - known}"


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= 130


def test_every_measurement_has_its_date_commit_machine_and_command():
    for section in read("docs/measurements.md").split("\n## ")[1:]:
        said = ""
        for block in section.split("\n\n"):
            if not block.startswith("|"):
                said += block.lower()
                continue
            head, _, *rows = [line.strip("| ").split(" | ") for line in block.splitlines()]
            if head[-4:] != ["date", "commit", "machine", "command"]:
                origin = said.partition("all rows:")[2]
                assert re.search(r"\d{4}-\d\d-\d\d;", origin), head
                assert "machine" in origin, head
                continue
            for row in rows:
                assert len(row) == len(head), row
                assert all(row), row
                assert re.fullmatch(r"\d{4}-\d\d-\d\d", row[-4]), row
