"""Families of quantized checkpoints, by `quant_method`: what their configs say, in terms of `quant/formats/`."""

FAMILIES = {
    "fp8": "rapid_infer.quant.families.fp8:Fp8Scheme",
    "fbgemm_fp8": "rapid_infer.quant.families.fp8:FbgemmScheme",
    "compressed-tensors": "rapid_infer.quant.families.compressed_tensors:CompressedTensorsScheme",
    "modelopt": "rapid_infer.quant.families.modelopt:ModeloptScheme",
    "modelopt_fp4": "rapid_infer.quant.families.modelopt:ModeloptScheme",
    "gptq": "rapid_infer.quant.families.gptq:GptqScheme",
    "awq": "rapid_infer.quant.families.awq:AwqScheme",
    "auto-round": "rapid_infer.quant.families.gptq:AutoRoundScheme",
    "mxfp4": "rapid_infer.quant.families.mxfp4:Mxfp4Scheme",
}
