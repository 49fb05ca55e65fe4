"""A model that does what the file named by FAULT says, on one rank and in one phase."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from rapid_infer_qwen3.model import Qwen3ForCausalLM

from rapid_infer.plugin import BuildContext


class FaultyForCausalLM(Qwen3ForCausalLM):
    def __init__(self, config: Any, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.rank, self.forwards = ctx.parallel.tp_rank, 0
        if next(self.parameters()).device.type != "meta":
            self.misbehave("load")

    def misbehave(self, phase: str) -> None:
        fault = json.loads(Path(os.environ["FAULT"]).read_text())
        if (fault["phase"], fault["rank"]) != (phase, self.rank):
            return
        if fault["how"] == "raise":
            raise RuntimeError(f"broken on purpose in {phase}")
        if fault["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault["how"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while fault["how"] == "busy":
            pass
        time.sleep(1000)

    def forward(self, batch: Any) -> Any:
        self.forwards += 1
        # The first one is that of the phase in which caches are allocated.
        self.misbehave("allocate" if self.forwards == 1 else "step")
        return super().forward(batch)
