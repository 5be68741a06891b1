"""gRPC and asyncio: parse, submit, stream, map errors."""
