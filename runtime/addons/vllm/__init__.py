"""The protocol of vLLM's gRPC engine, which the gateway smg speaks; needs smg-grpc-proto (extra ``vllm-grpc``)."""
