"""The page's files: complete, and nothing that its Content-Security-Policy would refuse."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]
WEB = ROOT / "runtime" / "serving" / "http" / "web"
OWN = sorted(path for path in WEB.iterdir() if not path.name.startswith("uPlot"))
MODULES = [path for path in OWN if path.suffix == ".js"]
NAMESPACE = "http://www.w3.org/2000/svg"
"""A name that looks like an address."""


class Names(HTMLParser):
    """What a page names, and what in it is inline."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.ids: list[str] = []
        self._is_code = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [v for name in ("src", "href", "action") if (v := values.get(name))]
        self.ids += [v for v in (values.get("id"),) if v]
        self.inline += [name for name in values if name == "style" or name.startswith("on")]
        self._is_code = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._is_code and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._is_code = False


def read(name: str) -> str:
    return (WEB / name).read_text("utf-8")


def test_every_file_that_the_page_names_is_there():
    names = Names(read("index.html")).addresses
    assert {"style.css", "page.js", "favicon.svg"} <= set(names)
    assert [name for name in names if not (WEB / name).is_file()] == []


def test_the_distribution_takes_every_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["outrider.runtime.serving.http"]
    taken = {path for pattern in patterns for path in WEB.parent.glob(pattern)}
    assert {*WEB.rglob("*")} <= taken


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_every_module_s_imports_are_there(module: Path):
    names = re.findall(r'from "(.+?)"', module.read_text("utf-8"))
    assert [name for name in names if not (WEB / name).is_file()] == []


def test_every_module_is_imported_from_the_page_on():
    found, waiting = set(), ["page.js"]
    while waiting:
        found.add(name := waiting.pop())
        waiting += set(re.findall(r'from "\./(.+?)"', read(name))) - found
    assert found == {path.name for path in MODULES}


def test_scripts_name_no_element_that_is_missing():
    asked = {name for path in MODULES for name in re.findall(r'at\("(.+?)"\)', read(path.name))}
    assert len(asked) > 10
    assert asked <= set(Names(read("index.html")).ids)


def test_nothing_is_inline():
    assert Names(read("index.html")).inline == []
    scripts = "".join(read(path.name) for path in MODULES)
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\b|new Function", scripts) == []
    )


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_is_fetched_from_outside(path: Path):
    text = path.read_text("utf-8").replace(NAMESPACE, "")
    assert re.findall(r"(?:https?:)?//[\w.]+\.\w+|@import|url\(", text) == []


def test_what_is_inline_or_outside_would_be_noticed():
    page = Names('<p style="x" onclick="y"><script>z</script><img src="//cdn.example/a.js">')
    assert page.inline == ["style", "onclick", "z"]
    assert page.addresses == ["//cdn.example/a.js"]


def test_the_key_is_sent_by_no_form_and_kept_nowhere():
    assert re.search(r"<(?:input|textarea|select|button)\b[^>]*\bname=", read("index.html")) is None
    scripts = "".join(read(path.name) for path in MODULES)
    assert re.findall("localStorage|sessionStorage|document.cookie|indexedDB", scripts) == []


def test_the_vendored_library_is_the_one_it_says_and_licensed():
    (script,) = WEB.glob("uPlot-*.iife.min.js")
    version = script.name.removesuffix(".iife.min.js").removeprefix("uPlot-")
    assert f"(v{version})" in script.read_text("utf-8")[:100]
    assert "MIT License" in read(f"uPlot-{version}.LICENSE.txt")
