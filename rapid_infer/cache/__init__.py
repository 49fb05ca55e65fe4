"""Paged caches on the host: what a page holds, who holds which, and which prefix is already there. No torch."""
