"""Where tensors lie: host memory or a GPU, their buffers and their dtypes."""
