"""Where the model runs: in this process, for now."""

from rapid_infer.executors.in_process import InProcessExecutor

__all__ = ["InProcessExecutor"]
