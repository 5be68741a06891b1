"""A Ray Serve application: ``outrider.v1`` through Ray's gRPC proxy, one served model per replica.

Only ``router`` and ``app`` import Ray; the rest is tested without it.
"""
