"""What steps cost on this machine: measured on the first start, and kept."""
