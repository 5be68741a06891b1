"""Which requests there can be, who may ask for how much, whose turn it is, and who would be answered too late."""
