"""What adapters do alike, without any framework: requests, options, names, records of memory."""
