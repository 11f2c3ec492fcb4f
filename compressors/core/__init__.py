"""What compressors and kernels stand on: errors, options, contexts, traits, payloads, checks."""
