"""What a request may ask for: as it arrived, the limits it is held against, and the checks between."""
