"""A setting that follows a row to the device is said in three files: what a user may ask, its definition, its use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import rapid_infer

EDITS: dict[str, dict[str, str]] = {
    "params.py": {
        "    seed: Annotated": "    logit_scale: float = 1.0\n    seed: Annotated",
    },
    "engine/row_fields.py": {
        '    RowField("seed"': (
            '    RowField("logit_scale", np.float32, _bounded("logit_scale"), neutral=1),\n    RowField("seed"'
        ),
        "    masks: bool": (
            "    scaled: bool = _asked(lambda request: request.params.logit_scale != 1)\n    masks: bool"
        ),
        "self.penalties or": "self.scaled or self.penalties or",
    },
    "worker/sample.py": {
        "    if not features.random:\n": (
            "    if features.scaled:\n"
            "        logits = logits * state.logit_scale.unsqueeze(1)\n"
            "    if not features.random:\n"
        ),
    },
}

SCRIPT = """
import json, sys
import rapid_infer
from rapid_infer import LLM, SamplingParams

params = [SamplingParams(temperature=0, max_tokens=1, logit_scale=scale) for scale in (1.0, -1.0)]
with LLM(sys.argv[1], device="cpu", dtype="float32", skip_tokenizer_init=True) as llm:
    head, seen = llm.engine.executor.runner.model.head, []
    logits = head.logits
    head.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
    outputs = llm.generate([[3, 1, 4]] * 2, params)
    chosen = [output.outputs[0].token_ids for output in outputs]
    best = [[seen[0][0].argmax().item()], [seen[0][1].argmin().item()]]
print(json.dumps([rapid_infer.__file__, chosen, best]))
"""


def test_a_new_setting_is_a_diff_of_three_files(llama, tmp_path: Path) -> None:
    copy = tmp_path / "rapid_infer"
    shutil.copytree(Path(rapid_infer.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in EDITS.items():
        text = (copy / name).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (copy / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])}
    command = [sys.executable, "-c", SCRIPT, str(llama.path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    where, chosen, best = json.loads(done.stdout.splitlines()[-1])
    assert Path(where).parent == copy
    assert chosen == best
    assert chosen[0] != chosen[1]
