"""Attention from installed libraries: providers of `paged_attention`, each imported when a layer binds it."""
