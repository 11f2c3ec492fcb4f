"""CUDA kernels, in C++ that NVRTC compiles on first use; nothing is imported from CuPy before.

Each does what the array code of its compressor does, bit for bit. A ``.cuh`` file holds one
concept; ``source`` puts them together, ``device`` compiles and launches, ``bucketed`` and the
modules beside it turn arrays into launches. No call waits for the device or copies to the host.
"""
