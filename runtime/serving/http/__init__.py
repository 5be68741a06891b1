"""The OpenAI-compatible protocol over HTTP: a listener beside gRPC's, a parser, sinks and a table of errors."""
