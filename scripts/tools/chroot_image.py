"""Run the steps of packaging/Dockerfile in a chroot of Debian, where no image builder is at hand, and the server in it.

sudo python -m scripts.tools.chroot_image FOLDER [--suite bookworm] [--mirror URL]

FOLDER/base is a minimal Debian made by debootstrap, FOLDER/build and FOLDER/image are the two stages. It shows that the
steps work on Debian's Python 3.11; not what a registry, a builder's cache or a container's isolation add.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer

from scripts.tools.results import ROOT

DOCKERFILE = ROOT / "packaging" / "Dockerfile"
NEEDED = "python3,python3-venv,python3-pip,ca-certificates"
# The digest that the file asks for stands for this folder.
BASE = "chroot@sha256:" + "0" * 64
# As the official image has it: one name, and no package manager beside pip.
AS_PYTHONS = "ln -sf python3 /usr/bin/python && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && rm -rf /var/cache/apt"


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile and its argument, lines joined and comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", " ", lines).splitlines():
        if line.strip():
            name, _, argument = line.strip().partition(" ")
            yield name.upper(), argument.strip()


@dataclass(slots=True)
class Image:
    """What a stage leaves: its folder, environment, user and commands."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def argv(self, command: Sequence[str], more: Mapping[str, str] = {}) -> list[str]:
        """Return the command line that runs a command within, as the image's user and with its environment."""
        path = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp"}
        variables = path | self.environment | self.arguments | dict(more)
        variables = {
            name: value.replace("$PATH", path["PATH"]) for name, value in variables.items()
        }
        inside = ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), *command]
        mounts = f"mount --rbind /dev {self.root}/dev && mount -t proc proc {self.root}/proc && "
        place = f"cd {shlex.quote(self.folder)} && exec {shlex.join(inside)}"
        chroot = shlex.join(
            ["chroot", f"--userspec={self.user}", str(self.root), "sh", "-c", place]
        )
        return [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            f"{mounts}exec {chroot}",
        ]


def of_pip() -> tuple[dict[str, str], list[Path]]:
    """Return this machine's settings of pip as variables, and the paths that these name: an index, certificates."""
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    found = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed, re.M))
    settings = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in found.items()}
    named = [Path(one) for value in found.values() for one in re.findall(r"/[^\s:]+", value)]
    # An index in a folder has its files beside its pages.
    needed = {path.parent if path.name == "simple" else path for path in named if path.exists()}
    return settings, sorted(needed)


class Builder:
    """Runs the instructions of a Dockerfile.

    Args:
        folder: of the base and the stages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pip, self._bound = of_pip()
        self._stages: dict[str, Image] = {}

    def build(self, text: str) -> Image:
        """Return the last stage."""
        arguments = {"BASE": BASE}
        image: Image | None = None
        for name, argument in instructions(text):
            if name == "FROM":
                _, _, stage = argument.partition(" AS ")
                image = self._begin(stage or "image")
            elif name == "ARG":
                key, _, value = argument.partition("=")
                if image is not None:
                    image.arguments[key] = arguments.get(key, value)
            else:
                assert image is not None, "FROM comes first"
                self._run(image, name, argument)
        assert image is not None
        image.arguments = {}
        return image

    def _begin(self, stage: str) -> Image:
        root = self._folder / stage
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self._folder / "base"), str(root)], check=True)
        self._stages[stage] = Image(root)
        return self._stages[stage]

    def _run(self, image: Image, name: str, argument: str) -> None:
        if name == "WORKDIR":
            image.folder = argument
            (image.root / argument.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "ENV":
            image.environment |= dict(one.split("=", 1) for one in shlex.split(argument))
        elif name == "USER":
            image.user = argument
        elif name == "COPY":
            self._copy(image, shlex.split(argument))
        elif name == "RUN":
            typer.echo(f"RUN {' '.join(argument.split())[:100]}", err=True)
            self._run_bound(image, argument)
        elif name == "ENTRYPOINT":
            image.entrypoint = json.loads(argument)
        elif name == "CMD":
            image.command = json.loads(argument)
        elif name not in ("EXPOSE", "HEALTHCHECK", "STOPSIGNAL"):
            raise typer.BadParameter(f"{name} is not known here")

    def _copy(self, image: Image, words: list[str]) -> None:
        options = [one for one in words if one.startswith("--")]
        *sources, target = [one for one in words if not one.startswith("--")]
        base = ROOT
        for option in options:
            base = self._stages[option.removeprefix("--from=")].root
        place = image.root / (Path(image.folder) / target).as_posix().lstrip("/")
        for source in sources:
            found = base / source.lstrip("/")
            if found.is_dir():
                shutil.copytree(found, place, dirs_exist_ok=True, symlinks=True, ignore=_left_out)
            else:
                into = place / found.name if target.endswith("/") else place
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, into)

    def _run_bound(self, image: Image, script: str) -> None:
        """Run a shell script as the image's user; what is bound is there for as long as it runs."""
        script = f"set -e; {script}"
        command = image.argv(["sh", "-c", script], self._pip)
        for path in self._bound:
            inside = image.root / str(path).lstrip("/")
            (inside if path.is_dir() else inside.parent).mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                inside.touch()
            mount = f"mount --bind {shlex.quote(str(path))} {shlex.quote(str(inside))} && "
            command[-1] = mount + command[-1]
        subprocess.run(command, check=True)


def _left_out(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]


def make_base(folder: Path, suite: str, mirror: str) -> None:
    """Make the Debian that both stages begin with; one that is there is used again."""
    base = folder / "base"
    if not (base / "usr" / "bin" / "python").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={NEEDED}", suite, str(base), mirror],
            check=True,
        )
        subprocess.run(["chroot", str(base), "sh", "-c", AS_PYTHONS], check=True)
    shutil.copy("/etc/resolv.conf", base / "etc" / "resolv.conf")


def main(
    folder: Path,
    suite: str = "bookworm",
    mirror: str = "http://deb.debian.org/debian",
) -> None:
    """Build, and print the command that runs the server."""
    make_base(folder.resolve(), suite, mirror)
    image = Builder(folder.resolve()).build(DOCKERFILE.read_text("utf-8"))
    typer.echo(shlex.join(image.argv([*image.entrypoint, *image.command])))


if __name__ == "__main__":
    typer.run(main)
