"""The base classes of compressors: the contract, chains, modifiers, bucketed codecs, feedback."""
