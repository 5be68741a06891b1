"""What accelerators serve of a bundle, an add-on: graphs for the CUDA provider, TensorRT plans."""
