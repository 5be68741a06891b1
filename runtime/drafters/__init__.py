"""What proposes tokens: one class per drafter, one line in the registry."""
