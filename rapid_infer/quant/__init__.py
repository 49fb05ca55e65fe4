"""How weights are stored and multiplied: one `QuantMethod` per format; plain bf16, fp16 and fp32 are the first."""

from rapid_infer.quant.method import ExpertsMethod, HeadMethod, QuantMethod, QuantScheme, select_scheme
from rapid_infer.quant.param_spec import IN, OUT, PART, Dim, ParamSpec
from rapid_infer.quant.plain import PlainExperts, PlainHead, PlainMethod, PlainScheme

__all__ = [
    "IN",
    "OUT",
    "PART",
    "Dim",
    "ExpertsMethod",
    "HeadMethod",
    "ParamSpec",
    "PlainExperts",
    "PlainHead",
    "PlainMethod",
    "PlainScheme",
    "QuantMethod",
    "QuantScheme",
    "select_scheme",
]
