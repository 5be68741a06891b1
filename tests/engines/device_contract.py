"""The engine contract for a bundle on a device; scripts/gpu_check.py gives the engines."""

from tests.engines.contract import EngineContract


class TestDevice(EngineContract):
    # Of logits up to some 10, in 16 bits on a device; a wrong token or position moves them by 1.
    atol = 0.1
