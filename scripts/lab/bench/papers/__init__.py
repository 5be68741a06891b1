"""The tables and figures of the two papers, on one's own pair of models."""
