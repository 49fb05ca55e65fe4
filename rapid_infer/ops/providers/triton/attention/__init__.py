"""Attention over paged keys and values, and the write of both."""
