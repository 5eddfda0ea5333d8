"""picotron-min: a minimal distributed trainer for Llama models, one file per parallelism."""
