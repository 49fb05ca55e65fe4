"""Which rank this is among which, and how ranks add up what each of them computed."""

from rapid_infer.parallel.state import ParallelState

__all__ = ["ParallelState"]
