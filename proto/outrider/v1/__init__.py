"""Generated wire types of ``outrider.v1``; regenerate with ``scripts/gen_proto.py``."""
