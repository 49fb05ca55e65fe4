"""How files store quantized matrices, and what becomes of them after loading: one of the three forms of the operators.

`fp8`, `int4` and `fp4` each hold the formats of one form.
"""
