"""Engines on accelerators, an add-on: a device's memory and samplers, ONNX Runtime's CUDA provider, TensorRT."""
