"""Pure decisions: no clock, randomness, thread, socket or tensor library; standard library and numpy only."""
