"""Plan graphs and TensorRT plans."""
