"""One rank's side of a step: device state, the forward and finish parts, sampling, and the copy back."""
