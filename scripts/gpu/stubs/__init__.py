"""Stub CUDA libraries, under which ONNX Runtime's real CUDA provider runs without a GPU."""
