"""From PyTorch to one canonical ONNX graph, and the graphs derived from it."""
