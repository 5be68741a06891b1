"""The gRPC server: parse requests, submit them, stream answers, map errors."""
