"""Compiles a model's Triton kernels without launching any: in a process beside the one that loads the model."""
