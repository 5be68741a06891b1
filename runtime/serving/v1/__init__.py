"""The protocol ``outrider.v1``: gRPC messages in, a call of the request handler, gRPC messages out."""
