"""``optimum-cli export outrider``: ``outrider export`` under the names that Optimum's users know.

Optimum imports every file of its namespace ``optimum.commands.register``, so no ``__init__`` lies beside this one, and
what takes seconds to import waits for ``run``. Where Optimum is not installed nobody reads this file.
"""

from __future__ import annotations

import argparse

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

PASSED_ON = (
    "weights", "draft-weights", "max-context", "max-source", "max-batch", "max-gamma", "max-tree-nodes",
    "calibration-text",
    "accept-parity",
)  # fmt: skip
"""Options that are called as those of outrider export, which checks them."""


class OutriderExportCommand(BaseOptimumCLICommand):
    """Makes a bundle of a model and its assistant."""

    COMMAND = CommandInfo(
        name="outrider", help="Export a model and its assistant for exact speculative decoding."
    )

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument(
            "-m", "--model", required=True, help="Target: a folder or a name on the Hub."
        )
        parser.add_argument("--assistant-model", help="Draft model, likewise.")
        for name in PASSED_ON:
            parser.add_argument(f"--{name}", help="As of outrider export.")
        parser.add_argument("output", help="Folder to make; must not exist.")

    def run(self) -> None:
        """Export, and end the process with the exit code of outrider export."""
        from outrider.runtime.cli.main import app

        given = vars(self.args)
        options = {
            "target": self.args.model,
            "out": self.args.output,
            "draft": self.args.assistant_model,
        }
        options |= {name: given[name.replace("-", "_")] for name in PASSED_ON}
        app(
            [
                "export",
                *(f"--{name}={value}" for name, value in options.items() if value is not None),
            ]
        )


REGISTER_COMMANDS = [(OutriderExportCommand, ExportCommand)]
