"""Compiled CPU kernels: C++ sources, their build and cache, and the ctypes binding. Used by `ops.cpu` alone, in engine
and worker processes; `firstlight doctor` asks `build.describe`."""
