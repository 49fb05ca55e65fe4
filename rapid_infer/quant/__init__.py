"""How weights are stored and multiplied: one `QuantMethod` per format; plain bf16, fp16 and fp32 are the first."""

from rapid_infer.quant.method import QuantMethod, QuantScheme, select_scheme
from rapid_infer.quant.param_spec import IN, OUT, PART, Dim, ParamSpec
from rapid_infer.quant.plain import PlainMethod, PlainScheme

__all__ = [
    "IN",
    "OUT",
    "PART",
    "Dim",
    "ParamSpec",
    "PlainMethod",
    "PlainScheme",
    "QuantMethod",
    "QuantScheme",
    "select_scheme",
]
