"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(help="A model directory, or `demo`: a small model that is fetched once.", show_default=True),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, for programs.")]
Dtype = Annotated[str, typer.Option(help="auto (as the checkpoint), bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence, prompt and answer. Default: the model's own.")]
ModelPlugin = Annotated[str | None, typer.Option(help="Take the model from this package when several offer it.")]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights.")]
