"""Compiled CPU kernels: C++ sources, their build and cache, and the ctypes binding. Used by the compiled
operations of `ops` and by `shared_collectives.py`, in engine and worker processes; `firstlight doctor` asks
`build.describe`."""
