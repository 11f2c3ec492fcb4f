"""What changes how the compressor to its left works: error feedback, momentum, rotations."""
