"""CUDA kernels, in C++ that NVRTC compiles on first use; nothing is imported from CuPy before.

Each does what the array code of its compressor does, bit for bit. A ``.cuh`` file holds one
concept; ``runtime`` puts them together, compiles and launches, and the modules beside them turn
arrays into launches. No call waits for the device or copies to the host, but where it says so.
"""
