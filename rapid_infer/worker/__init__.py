"""One rank's side of a step: device state, forward, sampling, and the copy back."""
