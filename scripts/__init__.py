"""Set-up-and-run entry points, benchmarks, training of the demo pair; nobody imports them but tests."""
