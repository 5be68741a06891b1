"""One thread owns the engines and runs steps: plan, draft, run, judge, commit."""
