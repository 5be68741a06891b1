"""Models and samplers on ONNX Runtime over a device's memory."""
