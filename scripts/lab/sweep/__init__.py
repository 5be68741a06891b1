"""One tiny random model of every causal-LM architecture of Transformers, exported or refused."""
