"""The Open Inference Protocol: generated messages and stubs, see ``inference.proto``."""
