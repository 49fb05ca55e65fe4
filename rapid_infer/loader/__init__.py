"""Weights: the remap table, strict accounting, streaming, and dummy weights.

How a tensor is cut belongs to the layer that owns the parameter (`rapid_infer.layers.parameter`); how it is named in a
checkpoint belongs to a model's `WeightMap`; this package brings both together.
"""
