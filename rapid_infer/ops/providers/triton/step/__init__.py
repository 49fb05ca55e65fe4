"""Both ends of a step: its inputs, and the tokens that it gave."""
