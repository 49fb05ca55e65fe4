"""How weights are stored and multiplied: one `QuantMethod` per format; plain bf16, fp16 and fp32 are the first."""

# ruff: noqa: F401
# The imports are the list of what there is.
from rapid_infer.quant.method import ExpertsMethod, HeadMethod, QuantMethod, QuantScheme
from rapid_infer.quant.online import OnlineScheme
from rapid_infer.quant.param_spec import IN, OUT, PART, Dim, ParamSpec
from rapid_infer.quant.plain import PlainExperts, PlainHead, PlainMethod, PlainScheme
from rapid_infer.quant.select import select_scheme
from rapid_infer.quant.stored import StoredModules, StoredPart
