"""TensorRT plans."""
