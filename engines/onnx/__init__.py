"""ONNX Runtime, on the host and through its CUDA provider."""
