"""The dialect ``outrider.v1``: gRPC messages in, a call of the one intake, gRPC messages out."""
