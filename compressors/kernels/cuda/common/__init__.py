"""What CUDA kernels of several rooms share: bucketed codecs, entries, many tensors a launch."""
