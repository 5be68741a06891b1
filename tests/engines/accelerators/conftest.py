"""Graphs and device samplers that the tests of this folder share; loading them takes most of the time."""

from __future__ import annotations

import pytest
from outrider.engines.accelerators.device.base import HostDevice
from outrider.engines.accelerators.device.sampling.kernels.graphs import open_kernel_sampler
from outrider.engines.accelerators.onnx.sampler import open_onnx_sampler
from outrider.engines.sampling.noise import CounterNoise
from outrider.export.accelerators.sampler_graphs import write_sampler_graphs

from tests.emulation.kernels.host import HostKernels
from tests.engines.accelerators.device.device_laws import MAX_TRIALS

# The graphs keep the laws of so many draft tokens.
MAX_GAMMA = 4


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Graph folders by (V, V of the draft), written when first asked for."""
    root = tmp_path_factory.mktemp("graphs")

    def folder(vocab_size, draft_vocab_size=None):
        path = root / f"{vocab_size}_{draft_vocab_size}"
        if not path.exists():
            write_sampler_graphs(
                path,
                vocab_size=vocab_size,
                draft_vocab_size=draft_vocab_size or vocab_size,
                max_gamma=MAX_GAMMA,
            )
        return path

    return folder


class Switch:
    """A ``NoiseSource`` whose source may be exchanged, so that tests share loaded graphs."""

    source = CounterNoise()

    def uniform(self, *args, **kwargs):
        return self.source.uniform(*args, **kwargs)

    def exponentials(self, *args, **kwargs):
        return self.source.exponentials(*args, **kwargs)


@pytest.fixture(scope="session", params=["graphs", "kernels"])
def loaded(request, folders):
    """Samplers by vocabulary, loaded once, and their noise: as ONNX graphs and as kernels."""
    made = {}

    def sampler(vocab_size):
        if vocab_size not in made:
            sizes = {"max_batch": MAX_TRIALS, "max_gamma": MAX_GAMMA, "vocab_size": vocab_size}
            noise = Switch()
            if request.param == "graphs":
                opened = open_onnx_sampler(folders(vocab_size), noise=noise, **sizes)
            else:
                opened = open_kernel_sampler(
                    HostKernels(), device=HostDevice(), noise=noise, **sizes
                )
            made[vocab_size] = (noise, opened)
        return made[vocab_size]

    return sampler
