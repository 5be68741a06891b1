"""The protocol of KServe and Triton: the Open Inference Protocol over gRPC, with Triton's streaming."""
