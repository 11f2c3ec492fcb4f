"""How CUDA C++ is compiled and launched, and what all of it is written with."""
