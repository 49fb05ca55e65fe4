"""Draws docs/figures/*.svg: `python scripts/make_figures.py`, or `--check` to compare only.

Plain boxes and arrows. Blue is the host, green the device, white what one hands to the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

from drawing import DEVICE, PAPER, Box, Frame, arrow, sheet, text

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
LEGEND = "blue: on the host; green: on the device; white: what is handed on"


def overview() -> str:
    """The whole runtime, and where packages come in."""
    return sheet(
        900,
        490,
        [
            Frame(20, 20, 560, 442, "rapid-infer: knows no model"),
            Frame(620, 20, 260, 442, "packages, by their entry points"),
            arrow((300, 108), (300, 138)),
            arrow((300, 200), (300, 230)),
            arrow((300, 292), (300, 322)),
            arrow((300, 384), (300, 398)),
            arrow((640, 261), (542, 261)),
            arrow((640, 353), (542, 353)),
            arrow((640, 79), (542, 79)),
            arrow((640, 169), (590, 169), (590, 245), (542, 245)),
            Box(
                60,
                46,
                480,
                62,
                "generate, chat, LLM, AsyncLLM, serve",
                ("text, chat templates, tool calls, HTTP as OpenAI's",),
            ),
            Box(60, 138, 480, 62, "engine", ("continuous batching, paged cache, prefix caching, chunked prefill",)),
            Box(
                60,
                230,
                480,
                62,
                "worker, loader, layers",
                ("one step program; ranks and weight formats are the layers' business",),
                DEVICE,
            ),
            Box(
                60,
                322,
                480,
                62,
                "operators",
                ("one meaning each; the provider that fits and ranks highest runs",),
                DEVICE,
            ),
            Box(60, 400, 480, 46, "torch, Triton kernels, CUDA graphs, NCCL", (), PAPER),
            Box(640, 48, 220, 62, "parsers", ("rapid_infer.tool_parsers, ...",)),
            Box(640, 138, 220, 62, "weight formats", ("rapid_infer.quantization",)),
            Box(640, 230, 220, 62, "models", ("rapid_infer.models: llama, yours, ...",)),
            Box(640, 322, 220, 62, "providers of operators", ("rapid_infer.ops",), DEVICE),
            text(750, 425, "pip install is all; nothing is edited", "middle"),
        ],
        "blue: on the host; green: on the device",
    )


def request_path() -> str:
    return sheet(
        900,
        400,
        [
            arrow((170, 51), (228, 51), label="Request"),
            arrow((400, 51), (458, 51)),
            arrow((650, 51), (708, 51)),
            arrow((315, 82), (315, 148)),
            arrow((400, 181), (458, 181)),
            arrow((650, 181), (708, 181)),
            arrow((555, 212), (555, 245), (445, 245), (445, 278)),
            arrow((540, 311), (598, 311)),
            arrow((795, 280), (795, 214)),
            Box(20, 20, 150, 62, "LLM", ("text, detokenizing",)),
            Box(230, 20, 170, 62, "EngineCore", ("launch, collect",)),
            Box(460, 20, 190, 62, "Scheduler", ("budget, rows, preemption",)),
            Box(710, 20, 170, 62, "CacheManager", ("blocks, prefix hashes",)),
            Box(230, 150, 170, 62, "Executor", ("in this process",)),
            Box(460, 150, 190, 62, "ModelRunner", ("entry in the ring",)),
            Box(710, 150, 170, 62, "DeviceRows", ("tokens, lengths, blocks",), DEVICE),
            Box(350, 280, 190, 62, "forward", ("model: hidden [S, hidden]",), DEVICE),
            Box(600, 280, 240, 62, "sample", ("head, sampling, tokens written back",), DEVICE),
            text(325, 120, "StepPlan down, StepResult up"),
        ],
        LEGEND,
    )


def plan() -> str:
    """From requests to what changes on the device."""
    return sheet(
        900,
        400,
        [
            arrow((190, 54), (248, 54)),
            arrow((190, 242), (219, 242), (219, 84), (248, 84)),
            arrow((500, 59), (648, 59), label="room? hits?"),
            arrow((320, 98), (320, 148)),
            arrow((450, 98), (450, 148)),
            arrow((320, 222), (320, 330), (628, 330)),
            arrow((470, 222), (470, 260), (628, 260)),
            Box(20, 20, 170, 78, "Request", ("prompt ids, parameters", "in the waiting queue")),
            Box(
                20,
                195,
                170,
                94,
                "RowState",
                ("known, computed, limit,", "capacity, epoch, tokens:", "arrays over rows"),
            ),
            Box(
                250,
                20,
                250,
                78,
                "Scheduler.schedule",
                ("how many tokens each row takes,", "who is preempted, who is admitted"),
            ),
            Box(
                650,
                20,
                230,
                94,
                "CacheManager",
                ("match: the cached prefix", "can_grow, grow: blocks for tokens", "release_after: once a step is done"),
            ),
            Box(235, 150, 160, 72, "PlanCache.next", ("the same rows decode:", "most arrays are shared")),
            Box(410, 150, 160, 72, "PlanBuilder.build", ("every other step",)),
            Box(630, 160, 250, 206, "ScheduledStep", (), PAPER),
            Box(
                645,
                190,
                220,
                126,
                "StepPlan",
                (
                    "rows, query_lens [R]",
                    "tokens [T], or none",
                    "sampled [S]",
                    "new_rows, new_blocks, masks",
                    "features: ways to sample",
                ),
                PAPER,
            ),
            text(755, 338, "whose results they are: requests,", "middle"),
            text(755, 354, "epochs, limits, stop_ids [S]", "middle"),
        ],
        LEGEND,
    )


def forward() -> str:
    """From a plan to the hidden states of the rows that get a token."""
    return sheet(
        900,
        430,
        [
            Frame(240, 205, 640, 190, "recorded as a CUDA graph, by number of rows or of tokens", 170),
            arrow((160, 59), (198, 59)),
            arrow((410, 48), (468, 48), label="write"),
            arrow((410, 84), (440, 84), (440, 145), (468, 145)),
            arrow((690, 145), (728, 145)),
            arrow((545, 98), (545, 112), (330, 112), (330, 228)),
            arrow((805, 176), (805, 195), (390, 195), (390, 228)),
            arrow((450, 275), (488, 275)),
            arrow((650, 275), (698, 275)),
            arrow((780, 322), (780, 350), (652, 350)),
            Box(20, 20, 140, 78, "StepPlan", ("a step's changes,", "as arrays"), PAPER),
            Box(200, 20, 210, 78, "ModelRunner", ("launch: what the entry holds,", "and what it has no place for")),
            Box(
                470,
                20,
                410,
                78,
                "StepRing.inputs",
                (
                    "pinned [slots, words] int32, read by the device itself:",
                    "row numbers, query lengths, token ids, new blocks",
                ),
                PAPER,
            ),
            Box(470, 120, 220, 56, "Staging", ("new rows, lists, masks: one copy",)),
            Box(730, 120, 150, 56, "DeviceRows", ("one slot per row",), DEVICE),
            Box(
                260,
                230,
                190,
                92,
                "decode_inputs",
                ("or mixed_inputs:", "apply new blocks,", "gather inputs of tokens"),
                DEVICE,
            ),
            Box(
                490,
                230,
                160,
                92,
                "ForwardBatch",
                ("input_ids, positions [T]", "attention: slots [T],", "seq_lens, block_table"),
                PAPER,
            ),
            Box(
                700,
                230,
                160,
                92,
                "model",
                ("embed, layers, norm;", "the last layer keeps", "the sampled tokens"),
                DEVICE,
            ),
            Box(430, 332, 220, 56, "ForwardOutput", ("hidden [S, hidden], rows, lengths",), PAPER),
        ],
        LEGEND,
    )


def sample() -> str:
    """From hidden states to the tokens that the host reads."""
    return sheet(
        900,
        430,
        [
            Frame(210, 10, 670, 185, "recorded as a CUDA graph, by number of rows and way to sample"),
            arrow((180, 75), (228, 75)),
            arrow((400, 61), (438, 61)),
            arrow((314, 105), (314, 150), (438, 150)),
            arrow((660, 61), (698, 61)),
            arrow((660, 150), (678, 150), (678, 85), (698, 85)),
            arrow((745, 105), (745, 228)),
            arrow((820, 105), (820, 138)),
            arrow((650, 260), (598, 260)),
            arrow((400, 260), (358, 260)),
            arrow((180, 260), (140, 260), (140, 328)),
            arrow((250, 360), (298, 360)),
            arrow((520, 360), (568, 360)),
            Box(20, 40, 160, 70, "ForwardOutput", ("hidden, rows,", "lengths [S]"), PAPER),
            Box(230, 40, 170, 65, "sample_tokens", ("by the settings of the rows",), DEVICE),
            Box(440, 36, 220, 50, "LMHead.argmax", ("all rows greedy: no logits",), DEVICE),
            Box(
                440,
                105,
                220,
                82,
                "LMHead.logits",
                ("process_logits: bias, masks, ...", "truncate_logits, gumbel_argmax"),
                DEVICE,
            ),
            Box(700, 40, 160, 65, "commit_tokens", ("the step's last kernel",), DEVICE),
            Box(770, 140, 100, 50, "DeviceRows", ("token, length",), DEVICE),
            Box(650, 230, 230, 62, "StepRing.results", ("pinned [slots, max_rows] int32",), PAPER),
            Box(400, 230, 198, 62, "ModelRunner.collect", ("waits for the step's event",)),
            Box(180, 230, 178, 62, "StepResult", ("token_ids [S, q], failed",), PAPER),
            Box(20, 330, 230, 62, "apply_result", ("to those recorded in ScheduledStep",)),
            Box(300, 330, 220, 62, "RowState.append", ("tokens and counters of live rows",)),
            Box(570, 330, 230, 62, "StepOutputs", ("new tokens, finished requests",), PAPER),
        ],
        LEGEND,
    )


DRAWN = {
    "overview": overview,
    "request-path": request_path,
    "step-plan": plan,
    "step-forward": forward,
    "step-sample": sample,
}


def main() -> None:
    stale = []
    for name, draw in DRAWN.items():
        path, made = FIGURES / f"{name}.svg", draw()
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(made, encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python scripts/make_figures.py")


if __name__ == "__main__":
    main()
