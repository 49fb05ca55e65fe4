"""An operator in CUDA C++: residual addition and RMSNorm in one kernel."""
