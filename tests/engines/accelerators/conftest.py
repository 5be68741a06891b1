"""Device samplers that the tests of this folder share, on the CPU."""

from __future__ import annotations

import pytest
from outrider.engines.accelerators.device.base import HostDevice
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.sampling.noise import CounterNoise

from tests.emulation.kernels.host import HostKernels
from tests.engines.accelerators.device.device_laws import MAX_GAMMA, MAX_TRIALS


class Switch:
    """A ``NoiseSource`` whose source may be exchanged, so that tests share samplers."""

    source = CounterNoise()

    def uniform(self, *args, **kwargs):
        return self.source.uniform(*args, **kwargs)

    def exponentials(self, *args, **kwargs):
        return self.source.exponentials(*args, **kwargs)


@pytest.fixture(scope="session")
def loaded():
    """Noise and sampler by vocabulary."""
    made = {}

    def sampler(vocab_size):
        if vocab_size not in made:
            sizes = {"max_batch": MAX_TRIALS, "max_gamma": MAX_GAMMA, "vocab_size": vocab_size}
            noise = Switch()
            made[vocab_size] = (
                noise,
                DeviceSampler(HostKernels(), device=HostDevice(), noise=noise, **sizes),
            )
        return made[vocab_size]

    return sampler
