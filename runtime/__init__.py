"""The online stage: pure decisions, drafters, step, worker, service, command line."""
