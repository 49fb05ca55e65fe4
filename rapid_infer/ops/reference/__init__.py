"""Operators: signature, meaning and torch reference, one file per op or for ops that belong together."""
