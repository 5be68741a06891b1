"""The same for protocols beside outrider.v1."""
