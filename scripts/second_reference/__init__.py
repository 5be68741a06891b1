"""Exports of tiny models by optimum-onnx, in an environment of its own, as a second reference for ours."""
